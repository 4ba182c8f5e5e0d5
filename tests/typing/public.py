"""What type checkers make of the public names: `make lint` has mypy and pyright check it; nothing runs it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import flodl_fast as ff


def codec_calls(codec: ff.Codec, frame: bytes, ranks: list[ff.RoundFrame]) -> None:
    assert_type(ff.Codec("00" * 16, ff.Revision.V0_8, max_payload=1 << 20), ff.Codec)
    assert_type(codec.revision, ff.Revision)
    assert_type(codec.encode(ff.Batch(0, 1.0, 0.0, 1)), bytes)
    assert_type(codec.encode_into(ff.Exiting(0), bytearray(64), offset=8), int)
    assert_type(codec.decode(memoryview(frame), trailing="error"), ff.Message)
    assert_type(codec.decode_payload(ff.MsgKind.CONTROL, frame), ff.ControlMsg)
    assert_type(codec.decode_payload("Metrics", frame, trailing="error"), ff.MetricsMsg)
    assert_type(codec.decode_payload(ff.MsgKind.HEARTBEAT, frame), ff.Reserved)
    assert_type(codec.decode_payload(int(ff.MsgKind.JOIN), frame), Any)
    assert_type(codec.decode_many(frame), tuple[list[ff.Message], int])
    assert_type(codec.timing_columns(frame), dict[str, np.ndarray])
    assert_type(codec.encode_round(ranks[0]), bytes)
    assert_type(codec.decode_round(frame, out=[np.zeros(3, np.float32)]), ff.RoundFrame)
    assert_type(codec.decode_mux(codec.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 1, frame))), ff.MuxRecord)
    assert_type(codec.check_control_hello(frame, world=4), tuple[int, bytes | None])
    assert_type(ff.model_sig({"w": np.zeros(3)}, [("n", np.zeros(1))]), bytes)


def messages(message: ff.Message) -> None:
    if isinstance(message, ff.Batch):
        assert_type(message.step_count, int)
        assert_type(message.batch_loss, float)
        assert_type(message.param_norm, float | None)
    if isinstance(message, ff.EpochAggregated):
        assert_type(message.metrics.scalars, dict[str, float])
    assert_type(ff.to_json(message, revision="0.7"), Any)
    assert_type(ff.from_json(ff.MsgKind.TIMING, "Exiting"), ff.TimingMsg)
    assert_type(ff.from_json("Relay", {}, revision="0.8"), ff.RelayMsg)
    assert_type(ff.from_json(str(message), {}), Any)
    assert_type(ff.timing_msg_to_wire(ff.Exiting(0)), ff.Exiting)
    assert_type(ff.metrics_msg_to_wire(ff.MetricsMsg(0, 0, 0.0, 0, 0.0, 0, 0.0, 0.0, 0.0, {}, None)), ff.MetricsMsg)


def rounds(arrays: list[NDArray[np.float32]], codec: ff.Codec) -> None:
    frame = ff.RoundFrame(arrays, ff.RoundKind.MODEL, weight=2)
    assert_type(frame.tensors, list[np.ndarray])
    assert_type(frame.realized, bool)
    assert_type(ff.reduce_frames([frame, None]), ff.RoundFrame)
    layout = ff.TensorLayout.of(arrays)
    assert_type(layout.encode(codec, arrays, ff.RoundKind.MODEL, 1.0), bytes)
    assert_type(layout.encode(codec, arrays, ff.RoundKind.MODEL, 1.0, out=bytearray(layout.frame_size)), int)
    assert_type(layout.decode_into(codec, b"", arrays), tuple[ff.RoundKind, float])
    fold = ff.RoundFold()
    fold.add(frame, name=3)
    assert_type(fold.reduce(), ff.RoundFrame)


def streams(codec: ff.Codec, kind: str) -> None:
    assert_type(ff.FrameReader(codec, "control").next(), ff.Message | None)
    assert_type(ff.FrameReader(codec, "round", prefixed=True).next(), ff.RoundFrame | None)
    assert_type(ff.FrameReader(codec, "mux").next(), ff.MuxRecord | None)
    assert_type(ff.FrameReader(codec, kind), ff.FrameReader[Any])
    for record in ff.FrameReader(codec, "mux"):
        assert_type(record.kind, ff.MuxKind)


def channels(codec: ff.Codec) -> None:
    with ff.DataChannel.connect(("127.0.0.1", 4004), codec, rank=0, world=2) as data:
        assert_type(data, ff.DataChannel)
        assert_type(data.all_reduce([np.zeros(3, np.float32)], ff.RoundKind.MODEL, 1.0), ff.RoundFrame)
    with ff.ControlChannel.connect(("127.0.0.1", 4005), codec, rank=0, world=2) as control:
        assert_type(control.recv(timeout=0.5), ff.Message | ff.RelayMsg)


async def aio_channels(codec: ff.Codec) -> None:
    async with await ff.aio.DataChannel.connect(("127.0.0.1", 4004), codec, rank=0, world=2) as data:
        assert_type(data, ff.aio.DataChannel)
        assert_type(await data.gather(1.0), np.ndarray)
    assert_type(asyncio.run(data.close()), None)


def a_rank(arrays: list[NDArray[np.float32]]) -> None:
    with ff.Worker.from_env(arrays, gamma=0.5, on_eval=lambda epoch: 0.5) as worker:
        assert_type(worker, ff.Worker)
        assert_type(worker.params, tuple[NDArray[np.float32], ...])
        assert_type(worker.plans(), Iterator[ff.Plan])
        for plan in worker.plans():
            for picks in plan.batches(32):
                assert_type(picks, NDArray[np.int64])
                assert_type(worker.step(loss=np.float32(0.1)), bool)
    assert_type(worker.epoch_metrics, ff.EpochMetrics | None)


def a_cluster() -> None:
    with ff.LocalCluster(world=3, samples=96, batch=8, epochs=1) as cluster:
        assert_type(cluster, ff.LocalCluster)
        assert_type(cluster.environment(0, route="relay"), dict[str, str])
        assert_type(cluster.epochs(), Iterator[ff.EpochMetrics])
        assert_type(cluster.wait().dead, dict[int, str])


def wrong_uses_are_refused(codec: ff.Codec) -> None:
    codec.encode("Exiting")  # type: ignore[arg-type]
    codec.decode("c417")  # type: ignore[arg-type]
    ff.Batch(0, 1.0)  # type: ignore[call-arg]

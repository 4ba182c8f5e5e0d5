"""LocalCluster: ranks of ours trained by it, its arithmetic, its order of messages, and ranks that fail it."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from local_support import LocalStack, Trained, start, train
from worker_support import WAIT, Running, until

import flodl_fast as ff
from flodl_fast.channel import ControlChannel, DataChannel, JoinChannel
from flodl_fast.environment import Environment
from flodl_fast.local import LocalCluster, LocalResult, aggregate_metrics
from flodl_fast.net import Deadlines
from flodl_fast.protocol import Revision
from flodl_fast.worker import Worker

f32 = np.float32


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    until(lambda: not [t for t in threading.enumerate() if t not in before and "flodl cluster" in t.name])


def addresses(cluster: LocalCluster, rank: int, direct: bool = True) -> dict:
    """The keywords of Worker that make it this rank."""
    ports = (cluster.address[1],) * 2 if direct else cluster.relay_ports
    data, control = (("127.0.0.1", port) for port in ports)
    host = f"host{rank}" if direct else None
    return {
        "rank": rank, "world": cluster._world, "codec": ff.Codec(cluster.salt), "data": data, "control": control,
        "host": host,
    }


class RawRank:
    """A rank by hand: it does what the test says, and nothing by itself."""

    def __init__(self, cluster: LocalCluster, rank: int, direct: bool = True) -> None:
        options = addresses(cluster, rank, direct)
        where = {"host": options["host"], "deadlines": Deadlines(attempts=1)}
        args = options["codec"], rank, options["world"]
        self.rank = rank
        self.data = DataChannel.connect(options["data"], *args, **where)
        self.control = ControlChannel.connect(options["control"], *args, **where)
        self.control.send(ff.Heartbeat(rank, 0))

    def recv(self, *skip: type):
        """The next message that is no beacon and none of these."""
        while isinstance(message := self.control.recv(WAIT), (ff.CoordHeartbeat, *skip)):
            pass
        return message

    def step(self, count: int) -> None:
        self.control.send(ff.Batch(self.rank, 1.0, 0.0, count))

    def report(self, epoch: int, batches: int, size: int) -> None:
        self.control.send(
            ff.MetricsMsg(self.rank, epoch, batches_processed=batches, samples_processed=batches * size)
        )

    def average(self) -> None:
        """The rounds that RequestParams asks for, in a world where nobody has trained."""
        self.control.send(ff.SnapshotReady(self.rank))
        self.data.gather(0)
        self.control.send(ff.SyncAck(self.rank, 0, 0.0))

    def wait_for(self, kind: type) -> None:
        while not isinstance(self.recv(), kind):
            pass

    def leave(self) -> None:
        self.wait_for(ff.Shutdown)
        self.control.send(ff.Exiting(self.rank))
        self.close()

    def close(self) -> None:
        self.control.close()
        self.data.close()


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("direct", [[True] * 3, [False] * 3, [True, False, True]], ids=["direct", "relay", "mixed"])
def test_three_ranks(direct):
    with LocalCluster(3, samples=200, batch=8, epochs=4) as cluster:
        ranks = [start(addresses(cluster, rank, direct[rank]), batch=8) for rank in range(3)]
        epochs = list(cluster.epochs())
        result = cluster.wait(WAIT)
        ranks = [rank.result() for rank in ranks]
    assert [metrics.epoch for metrics in epochs] == [0, 1, 2, 3]
    assert result.epochs == epochs
    assert result.dead == {}
    assert result.reason is None
    assert result.global_step == 4 * 24
    assert len({b"".join(p.tobytes() for p in rank.params) for rank in ranks}) == 1
    shares = [(0, 67), (67, 67), (134, 66)]
    for rank, (offset, size) in zip(ranks, shares, strict=True):
        assert rank.picks == {epoch: list(range(offset, offset + size // 8 * 8)) for epoch in range(4)}
        told = [message.metrics for message in rank.messages if isinstance(message, ff.EpochAggregated)]
        assert told == epochs
    for metrics in epochs:
        assert metrics.avg_loss == 1.0
        assert metrics.scalars == {"rank": 1.0}
        assert metrics.per_rank == [{"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0}]
        assert metrics.per_rank_batch_share == [1 / 3] * 3


def test_what_each_rank_is_told_in_order():
    with LocalStack("--hosts", "0,1,2", "--samples", 96, "--epochs", 3) as cluster:
        ranks = [start(cluster.options(rank)) for rank in range(3)]
        lines = cluster.lines()
        ranks = [rank.result() for rank in ranks]
    assert lines[-1] == {
        "done": True, "avg_count": 3, "version": 3, "global_step": 9, "last_epoch": 2, "dead": 0
    }
    for number, rank in enumerate(ranks):
        expected = [ff.SetEpochCallbackRole(0)]
        for epoch in range(3):
            expected += [
                ff.StartEpoch(ff.EpochPlan(epoch, 32 * number, 32)),
                ff.RequestParams(), ff.Throttle(), ff.Update(epoch + 1), ff.SetGlobalStep(3 * epoch + 3),
            ]
        told = [m for m in rank.messages if not isinstance(m, (ff.CoordHeartbeat, ff.EpochAggregated))]
        assert told == [*expected, ff.Shutdown()]
        # An epoch's metrics may come before its average, never after the next epoch has begun.
        epochs = [
            m.metrics.epoch if isinstance(m, ff.EpochAggregated) else -m.plan.epoch - 1
            for m in rank.messages if isinstance(m, (ff.EpochAggregated, ff.StartEpoch))
        ]
        assert epochs == [-1, 0, -2, 1, -3, 2]
        # One batch a rank and epoch: the mean of 0, 1, 2 gains 0.5 three times.
        assert rank.params[0].tolist() == [2.5] * 6
        assert rank.params[1].tolist() == [[0.5] * 3] * 2


def test_steps_left_at_the_end_are_averaged():
    def average(version: int, global_step: int) -> None:
        for rank in ranks:
            assert rank.recv(ff.EpochAggregated) == ff.RequestParams()
            assert rank.recv() == ff.Throttle()
        for answer in [Running(rank.average) for rank in ranks]:
            answer.result()
        for rank in ranks:
            assert rank.recv(ff.EpochAggregated) == ff.Update(version)
            assert rank.recv() == ff.SetGlobalStep(global_step)

    with LocalCluster(2, samples=3, batch=1, epochs=1) as cluster:
        ranks = [RawRank(cluster, 0), RawRank(cluster, 1)]
        for rank, plan in zip(ranks, (ff.EpochPlan(0, 0, 2), ff.EpochPlan(0, 2, 1)), strict=True):
            assert rank.recv() == ff.SetEpochCallbackRole(0)
            assert rank.recv() == ff.StartEpoch(plan)
            rank.step(1)
        average(version=1, global_step=2)
        ranks[0].step(2)
        ranks[0].report(0, 2, 1)
        ranks[1].report(0, 1, 1)
        average(version=2, global_step=3)
        for rank in ranks:
            assert rank.recv() == ff.Shutdown()
            rank.control.send(ff.Exiting(rank.rank))
        result = cluster.wait(WAIT)
        for rank in ranks:
            rank.close()
    assert (result.averages, result.global_step, result.dead) == (2, 3, {})


# -------------------------------------------------------------------------------------------------------- arithmetic


def odd_arrays(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape).astype(f32) for shape in ((7,), (3, 5), (), (0, 4), (1000,))]
    arrays[0][:4] = [-0.0, np.inf, 1e-42, 3e38]
    return arrays


@pytest.mark.parametrize("kind", ff.RoundKind)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_round_is_reduce_frames_in_rank_order(kind, order):
    with LocalCluster(3, samples=3, batch=1, epochs=1) as cluster:
        ranks = [RawRank(cluster, rank, direct=rank != 1) for rank in range(3)]
        for masses in ((1.0, 2.5, 4.0), (3.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
            frames = [ff.RoundFrame(odd_arrays(rank), kind, masses[rank]) for rank in range(3)]
            expected = ff.reduce_frames(frames)
            replies = {}
            for rank in order:
                call = partial(ranks[rank].data.all_reduce, frames[rank].tensors, kind, masses[rank])
                replies[rank] = Running(call)
                time.sleep(0.02)
            for rank in order:
                reply = replies[rank].result()
                assert (reply.kind, reply.weight) == (kind, expected.weight)
                if reply.realized:
                    for got, tensor in zip(reply.tensors, expected.tensors, strict=True):
                        assert (got.shape, got.tobytes()) == (tensor.shape, tensor.tobytes())
        for rank in ranks:
            rank.close()


class RelayLeg:
    """A connection of a relay by hand, for a host of two ranks."""

    def __init__(self, cluster: LocalCluster, magic: int) -> None:
        self.codec = ff.Codec(cluster.salt)
        self._reader = ff.FrameReader(self.codec, "mux")
        self._sock = socket.create_connection(cluster.address, WAIT)
        self._sock.sendall(magic.to_bytes(4, "little"))
        self.send(ff.MuxKind.CONTROL, ff.RelayHello("host", [0, 2]))
        assert self.recv().payload == ff.RelayHelloAck()

    def send(self, kind: ff.MuxKind, payload, rank: int = 0) -> None:
        self._sock.sendall(self.codec.encode_mux(ff.MuxRecord(kind, rank, payload)))

    def tell(self, message: ff.TimingMsg) -> None:
        self.send(ff.MuxKind.DATA, self.codec.encode(message), message.rank)

    def recv(self) -> ff.MuxRecord:
        while (record := self._reader.next()) is None:
            self._reader.feed(self._sock.recv(1 << 16))
        return record

    def told(self) -> tuple[int, ff.ControlMsg]:
        """The next message to a rank that is no beacon, and the rank."""
        while True:
            record = self.recv()
            if not isinstance(message := self.codec.decode(record.payload), ff.CoordHeartbeat):
                return record.rank, message

    def close(self) -> None:
        self._sock.close()


@pytest.mark.parametrize("leg", ["data", "control"])
def test_a_relay_of_two_ranks_that_loses_one(leg):
    with LocalCluster(3, samples=30, batch=2, epochs=1) as cluster:
        legs = data, control = RelayLeg(cluster, 0xF10D17E1), RelayLeg(cluster, 0xF10D17E2)
        direct = RawRank(cluster, 1)
        for rank in (0, 2):
            control.tell(ff.Heartbeat(rank, 0))
        assert [control.told() for _ in range(4)] == [
            (0, ff.SetEpochCallbackRole(0)), (2, ff.SetEpochCallbackRole(0)),
            (0, ff.StartEpoch(ff.EpochPlan(0, 0, 10))), (2, ff.StartEpoch(ff.EpochPlan(0, 20, 10))),
        ]
        summed = ff.RoundFrame([np.array([1.5, 8], f32)], ff.RoundKind.MODEL, 3.0)
        data.send(ff.MuxKind.HOST_FRAME, data.codec.encode_round(summed))
        reply = direct.data.all_reduce([np.array([0.5, 4], f32)], ff.RoundKind.MODEL, 1.0)
        assert (reply.weight, reply.tensors[0].tolist()) == (4.0, [0.5, 3.0])
        record = data.recv()
        assert record.kind is ff.MuxKind.BROADCAST
        assert data.codec.decode_round(record.payload).tensors[0].tolist() == [0.5, 3.0]

        legs[leg == "control"].send(ff.MuxKind.CONTROL, ff.RelayRankExit(2))
        assert data.recv().payload == ff.RelayDeclareDead(2)
        assert control.told() == (0, ff.ExtendPartition(20, 5))
        data.send(ff.MuxKind.HOST_FRAME, data.codec.encode_round(summed))
        assert direct.data.all_reduce([np.zeros(2, f32)], ff.RoundKind.MODEL, 1.0).weight == 4.0
        for connection in (*legs, direct):
            connection.close()


def test_metrics_of_several_reports_a_rank():
    reports = [
        ff.MetricsMsg(0, 5, 2.0, 3, 10.0, 30, 9.0, 7.0, 2.0, {"accuracy": (1.5, 3), "once": (4.0, 2)}),
        ff.MetricsMsg(0, 5, 4.0, 1, 30.0, 10, 8.0, 9.0, 1.0, {"accuracy": (0.5, 1), "never": (9.0, 0)}),
        ff.MetricsMsg(2, 5, 1.0, 6, 20.0, 60, 0.0, 3.0, 4.0, {"accuracy": (6.0, 12)}),
    ]
    assert aggregate_metrics(5, 3, reports) == ff.EpochMetrics(
        epoch=5,
        scalars={"accuracy": (4 * 0.5 + 6 * 0.5) / 10, "once": 2.0, "never": 0.0},
        per_rank=[{"accuracy": 0.5, "once": 2.0, "never": 0.0}, {}, {"accuracy": 0.5}],
        avg_loss=(3 * 2.0 + 4.0 + 6.0) / 10,
        epoch_ms=30.0,
        per_rank_throughput=[40 / 9.0, 0.0, 60 / 20.0],
        per_rank_batch_share=[0.4, 0.0, 0.6],
        per_rank_share_complete_ms=[9.0, 0.0, 0.0],
        per_rank_compute_only_ms=[9.0, 0.0, 3.0],
        per_rank_data_starve_ms=[2.0, 0.0, 4.0],
        device_indices=bytes(3),
    )


@pytest.mark.parametrize("newer", [Revision.V0_7, Revision.V0_8])
def test_metrics_of_each_rank_from_0_7_on(newer):
    reports = [
        ff.MetricsMsg(0, 5, 2.0, 3, samples_processed=30), ff.MetricsMsg(0, 5, 4.0, 1, samples_processed=10),
        ff.MetricsMsg(2, 5, 1.0, 6, samples_processed=60),
    ]  # fmt: skip
    metrics = aggregate_metrics(5, 3, reports, revision=newer)
    assert (metrics.per_rank_loss, metrics.per_rank_samples) == ([(3 * 2.0 + 4.0) / 4, None, 1.0], [40, 0, 60])
    metrics.per_rank_loss = metrics.per_rank_samples = []
    assert metrics == aggregate_metrics(5, 3, reports)


def test_metrics_of_nothing():
    metrics = aggregate_metrics(0, 2, [ff.MetricsMsg(0, 0), ff.MetricsMsg(1, 0)])
    assert (metrics.avg_loss, metrics.scalars, metrics.per_rank_batch_share) == (0.0, {}, [0.5, 0.5])


# --------------------------------------------------------------------------------------------------------- callbacks


def calling_back(cluster: LocalCluster, rank: int, **callbacks) -> Running:
    def life() -> None:
        params = [np.zeros(1, f32)]
        with Worker(params, formation=False, **addresses(cluster, rank), **callbacks) as worker:
            for plan in worker.plans():
                for _ in plan.batches(1):
                    worker.step(0.0)

    return Running(life)


def test_evaluations_and_checkpoints():
    def refuse(version: int) -> None:
        raise OSError("no space left")

    with LocalCluster(2, samples=2, batch=1, epochs=4, evaluate_every=2, checkpoint_every=3) as cluster:
        heard: list[ff.ControlMsg] = []
        saved: list[int] = []
        ranks = [
            calling_back(cluster, 0, on_eval=lambda epoch: epoch + 0.25, on_checkpoint=refuse),
            calling_back(cluster, 1, on_checkpoint=saved.append, on_message=heard.append),
        ]
        for rank in ranks:
            rank.result()
        result = cluster.wait(WAIT)
    assert [(e.rank, e.schedule_id, e.epoch, e.metric) for e in result.evaluations] == [
        (0, 2, 2, 2.25), (0, 2**64 - 1, 4, 4.25)
    ]
    told = [m for m in heard if isinstance(m, ff.EvalBroadcast)]
    assert told == [ff.EvalBroadcast(2, 2.25), ff.EvalBroadcast(4, 4.25)]
    assert [(c.rank, c.version, c.error) for c in result.checkpoints] == [
        (0, 3, "OSError: no space left"), (1, 3, None)
    ]
    assert saved == [3]


def test_ranks_ask_for_an_evaluation_and_a_checkpoint():
    with LocalCluster(1, samples=1, batch=1, epochs=3) as cluster:
        done: list[tuple[str, int]] = []

        def life() -> None:
            with Worker(
                [np.zeros(1, f32)], formation=False, **addresses(cluster, 0),
                on_eval=lambda epoch: done.append(("evaluated", epoch)) or 0.0,
                on_checkpoint=lambda version: done.append(("saved", version)),
            ) as worker:
                for plan in worker.plans():
                    if plan.epoch == 1:
                        worker.request_checkpoint()
                        worker.request_eval()
                    for _ in plan.batches(1):
                        worker.step(0.0)

        Running(life).result()
        cluster.wait(WAIT)
    assert done == [("saved", 2), ("evaluated", 2)]


@pytest.mark.parametrize("save", [True, False])
def test_stop(save):
    saved: list[ff.SaveReason] = []
    with LocalCluster(2, samples=2, batch=1, epochs=10_000_000) as cluster:
        ranks = [calling_back(cluster, rank, on_shutdown_save=saved.append) for rank in range(2)]
        next(cluster.epochs())
        cluster.stop(save=save)
        result = cluster.wait(WAIT)
        for rank in ranks:
            rank.result()
    assert result.epochs
    assert result.dead == {}
    if save:
        assert saved == [ff.SaveReason.GRACEFUL_SHUTDOWN] * 2
        assert result.reason is ff.SaveReason.GRACEFUL_SHUTDOWN
    else:
        assert saved == []
        assert result.reason is None


def test_what_a_rank_trains_before_the_update_waits_for_the_next_average():
    with LocalCluster(2, samples=4, batch=1, epochs=1) as cluster:
        first, second = (RawRank(cluster, rank) for rank in range(2))
        for rank in (first, second):
            rank.step(1)
        first.wait_for(ff.RequestParams)
        first.control.send(ff.SyncAck(0, 0, 0.0))
        first.step(2)  # before it is told of the Throttle
        first.control.send(ff.EvalResult(0, 0, 0, 0.0, 0.0))
        second.wait_for(ff.EvalBroadcast)  # The step has been taken by then.
        second.control.send(ff.SyncAck(1, 0, 0.0))
        first.report(0, 2, 1)
        second.report(0, 1, 1)
        second.wait_for(ff.RequestParams)
        for rank in (first, second):
            rank.control.send(ff.SyncAck(rank.rank, 0, 0.0))
        for rank in (first, second):
            rank.leave()
        result = cluster.wait(WAIT)
    assert (result.averages, result.global_step) == (2, 3)


# ------------------------------------------------------------------------------------------------------------ deaths


def finished(cluster: LocalCluster, ranks: list[Running]) -> tuple[LocalResult, list[Trained]]:
    result = cluster.wait(WAIT)
    return result, [rank.result() for rank in ranks]


def test_a_silent_rank_is_dead_and_its_work_goes_to_the_others(monkeypatch):
    monkeypatch.setattr("flodl_fast.worker.HEARTBEAT", 0.1)  # The others' are not to be missed.
    with LocalCluster(3, samples=60, batch=2, epochs=2, heartbeat_timeout=2.5) as cluster:
        silent = RawRank(cluster, 2)
        ranks = [start(addresses(cluster, rank), batch=2, pause=0.05) for rank in range(2)]
        assert silent.recv() == ff.SetEpochCallbackRole(0)
        assert silent.recv() == ff.StartEpoch(ff.EpochPlan(0, 40, 20))
        silent.step(1)
        silent.step(2)  # two of its ten batches, and never a word again
        result, ranks = finished(cluster, ranks)
        with pytest.raises(ff.ChannelError, match="declared rank 2 dead"):
            silent.data.all_reduce([np.zeros(3, f32)], ff.RoundKind.CONTROL, 0.0)
        silent.close()
    assert result.dead == {2: "no sign of life for 2.5 s"}
    assert [len(metrics.per_rank[2]) for metrics in result.epochs] == [0, 0]
    # Both stood still in the first average for want of rank 2, within their plans, which its other 16 samples extend.
    assert sorted(ranks[0].picks[0] + ranks[1].picks[0]) == [*range(40), *range(44, 60)]
    assert [rank.picks[1] for rank in ranks] == [[*range(20)], [*range(20, 40)]]
    assert ranks[0].params[0].tobytes() == ranks[1].params[0].tobytes()


def test_what_a_dead_rank_has_inherited_is_inherited_again():
    with LocalCluster(3, samples=60, batch=2, epochs=1) as cluster:
        ranks = [RawRank(cluster, rank) for rank in range(3)]
        plans = [rank.recv(ff.SetEpochCallbackRole).plan for rank in ranks]
        assert plans == [ff.EpochPlan(0, 0, 20), ff.EpochPlan(0, 20, 20), ff.EpochPlan(0, 40, 20)]
        ranks[2].step(6)  # 12 of its samples
        ranks[2].control.close()
        assert [rank.recv() for rank in ranks[:2]] == [ff.ExtendPartition(52, 4), ff.ExtendPartition(56, 4)]
        ranks[1].step(11)  # all of its own 20, and 2 of those
        ranks[1].control.close()
        assert ranks[0].recv() == ff.ExtendPartition(58, 2)
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
@pytest.mark.parametrize("what", ["data", "control"])
def test_a_rank_whose_connection_ends_is_dead_at_once(what, direct):
    with LocalCluster(3, samples=60, batch=2, epochs=3) as cluster:
        leaver = RawRank(cluster, 0, direct)
        ranks = [start(addresses(cluster, rank, direct), batch=2) for rank in (1, 2)]
        assert leaver.recv() == ff.SetEpochCallbackRole(0)
        getattr(leaver, what).close()
        result, ranks = finished(cluster, ranks)
        leaver.close()
    assert list(result.dead) == [0]
    assert [m for m in ranks[0].messages if isinstance(m, ff.SetEpochCallbackRole)] == [
        ff.SetEpochCallbackRole(0), ff.SetEpochCallbackRole(1)
    ]
    assert ranks[0].params[0].tobytes() == ranks[1].params[0].tobytes()


def test_a_death_in_the_middle_of_a_round():
    with LocalCluster(2, samples=2, batch=1, epochs=1) as cluster:
        ranks = [RawRank(cluster, 0), RawRank(cluster, 1)]
        reply = Running(ranks[0].data.all_reduce, [np.full(3, 7, f32)], ff.RoundKind.MODEL, 2.0)
        ranks[0].recv(), ranks[1].recv()  # they are told of the first epoch: the run has begun
        ranks[1].close()
        frame = reply.result()
        assert frame.weight == 2.0
        assert frame.tensors[0].tolist() == [3.5] * 3
        ranks[0].close()


def test_the_last_rank_that_dies_ends_the_run():
    with LocalCluster(1, samples=2, batch=1, epochs=1) as cluster:
        rank = RawRank(cluster, 0)
        rank.recv()
        rank.close()
        with pytest.raises(ff.ChannelError, match=r"all ranks are lost: .*the peer has closed the channel"):
            cluster.wait(WAIT)


# ------------------------------------------------------------------------------------------------------------ faults


def wait_no_longer(cluster: LocalCluster) -> None:
    """Now that the test has come so far, half a second from the start is all that ranks have to come."""
    cluster._coordinator._dial_in = 0.5


def test_why_a_rank_was_refused_is_told_where_it_is_missed():
    with LocalCluster(1, samples=3, batch=1, epochs=1) as cluster:
        address = addresses(cluster, 0, direct=False)["data"]
        with pytest.raises(ff.HandshakeError):
            DataChannel.connect(address, ff.Codec(cluster.salt, "0.8"), 0, 1, deadlines=Deadlines(attempts=1))
        until(lambda: cluster._coordinator.refusal)
        wait_no_longer(cluster)
        with pytest.raises(ff.ChannelError, match=r"\[0\] have not come in 0.5 s; the last .* version 3 \(of 0\.8\)"):
            cluster.wait(WAIT)


def test_ranks_that_do_not_come():
    with LocalCluster(3, samples=3, batch=1, epochs=1) as cluster:
        rank = RawRank(cluster, 1)
        until(lambda: 1 in cluster._coordinator._ranks)
        wait_no_longer(cluster)
        with pytest.raises(ff.ChannelError, match=r"ranks \[0, 2\] have not come in 0.5 s"):
            cluster.wait(WAIT)
        with pytest.raises(ff.ChannelError):
            next(cluster.epochs())
        rank.close()


def test_ranks_that_do_not_agree_on_formation():
    with LocalCluster(2, samples=2, batch=1, epochs=1) as cluster:

        def life(rank):
            with pytest.raises(ff.ChannelError), Worker(
                [np.zeros(3, f32)], formation=rank == 0, **addresses(cluster, rank, direct=False)
            ) as worker:
                list(worker.plans())

        ranks = [Running(life, rank) for rank in range(2)]
        until(lambda: 0 in cluster._reducer.present() and 1 in cluster._coordinator._ranks)
        wait_no_longer(cluster)
        error = r"ranks \[0\] still wait in the rounds of their formation after 0.5 s, ranks \[1\] do not: .*formation="
        with pytest.raises(ff.ChannelError, match=error):
            cluster.wait(WAIT)
        for rank in ranks:
            rank.result()


def test_a_rank_that_leaves_before_all_are_there():
    with LocalCluster(2, samples=2, batch=1, epochs=1) as cluster:
        RawRank(cluster, 1).close()
        with pytest.raises(ff.ChannelError, match="rank 1 left before all ranks were there"):
            cluster.wait(WAIT)


def test_a_rank_whose_data_ends_just_as_its_control_comes():
    with LocalCluster(1, samples=3, batch=1, epochs=1) as cluster:
        arriving = SimpleNamespace(ranks=(0,), model_sigs=())

        def post(call, *args):  # the end of its data is told before it is taken in
            del cluster._coordinator.post
            cluster._lost((0,), "the stream ends")
            cluster._coordinator.post(call, *args)

        cluster._coordinator.post = post
        assert cluster._coordinator.arrived(arriving)
        with pytest.raises(ff.ChannelError, match="rank 0 left before all ranks were there: the stream ends"):
            cluster.wait(WAIT)


def test_tensors_that_do_not_match():
    with LocalCluster(2, samples=2, batch=1, epochs=1) as cluster:
        ranks = [RawRank(cluster, rank) for rank in range(2)]
        rounds = [
            Running(rank.data.all_reduce, [np.zeros(3 + rank.rank, f32)], ff.RoundKind.MODEL, 1.0) for rank in ranks
        ]
        with pytest.raises(ff.TensorError, match=r"the frame of rank 1 does not fit those of lower ranks: .*shape"):
            cluster.wait(WAIT)
        for running in rounds:
            with pytest.raises(ff.ChannelError):
                running.result()
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
def test_the_ceiling_of_a_frame_can_be_set(direct):
    tensors = [np.ones(1000, f32)]
    size = ff.TensorLayout.of(tensors).frame_size
    with LocalCluster(1, samples=1, batch=1, epochs=1, frame_ceiling=size) as cluster:
        rank = RawRank(cluster, 0, direct)
        assert rank.data.all_reduce(tensors, ff.RoundKind.MODEL, 1.0).tensors[0].tolist() == [1.0] * 1000
        with pytest.raises(ff.ChannelError):
            rank.data.all_reduce([np.ones(1001, f32)], ff.RoundKind.MODEL, 1.0)
        with pytest.raises(ff.ChannelError, match=rf"{size + 4} bytes is above the limit of {size} \(frame_ceiling\)"):
            cluster.wait(WAIT)
        rank.close()


def test_strangers_are_refused_and_nobody_minds(caplog):
    caplog.set_level(logging.WARNING, logger="flodl_fast.local")
    with LocalCluster(2, samples=4, batch=1, epochs=2) as cluster:
        first = start(addresses(cluster, 0), batch=1)
        until(lambda: cluster._coordinator._arrived and cluster._reducer._hosts)
        quick = {"host": "h", "deadlines": Deadlines(attempts=1)}
        wrong = ff.Codec(bytes(16))
        with pytest.raises(ff.HandshakeError, match="a peer does so where salt"):
            ControlChannel.connect(cluster.address, wrong, 1, 2, **quick)
        with pytest.raises(ff.HandshakeError, match="salt, rank, world"):
            ControlChannel.connect(cluster.address, ff.Codec(cluster.salt), 1, 3, **{**quick, "host": None})
        until(lambda: "refused a connection" in caplog.text)
        with JoinChannel.connect(cluster.address, ff.Codec(cluster.salt)) as join, pytest.raises(ff.ChannelClosed):
            join.recv(WAIT)
        twin = ControlChannel.connect(cluster.address, ff.Codec(cluster.salt), 0, 2, **quick)
        twins_data = DataChannel.connect(cluster.address, ff.Codec(cluster.salt), 0, 2, **quick)
        with socket.create_connection(cluster.address) as stranger:
            stranger.sendall(b"POST")
            assert stranger.recv(1) == b""
        until(lambda: caplog.text.count("one of them is there already") == 2)
        twin.close()
        twins_data.close()
        second = start(addresses(cluster, 1), batch=1)
        result, _ = finished(cluster, [first, second])
    assert result.dead == {}
    assert len(result.epochs) == 2
    assert "join agent" in caplog.text


def test_a_second_frame_before_the_reply_is_the_ranks_end():
    with LocalCluster(2, samples=4, batch=1, epochs=1) as cluster:
        ranks = [RawRank(cluster, rank) for rank in range(2)]
        for rank in ranks:
            rank.recv()
        codec = ff.Codec(cluster.salt)
        frame = codec.encode_round(ff.RoundFrame([np.zeros(1, f32)], ff.RoundKind.CONTROL))
        record = codec.encode_mux(ff.MuxRecord(ff.MuxKind.HOST_FRAME, 0, frame))
        ranks[1].data._link.write(record + record)
        while not isinstance(ranks[0].recv(), ff.ExtendPartition):
            pass
        for rank in ranks:
            rank.close()


def test_messages_that_mean_nothing_are_dropped(caplog):
    with LocalCluster(1, samples=2, batch=1, epochs=1) as cluster:
        rank = RawRank(cluster, 0)
        rank.control.send(ff.Batch(7, 1.0, 0.0, 1))
        rank.control.send(ff.MetricsMsg(9, 0))
        rank.control.send(ff.MetricsMsg(0, 17))
        rank.control.send(ff.JoinRankExited(0, 1))
        rank.control.send(ff.DashboardRegister(0, 8080))
        rank.control.send(ff.SyncAck(0, 0, None))
        assert [type(rank.recv()) for _ in range(2)] == [ff.SetEpochCallbackRole, ff.StartEpoch]
        rank.report(0, 0, 1)
        rank.leave()
        result = cluster.wait(WAIT)
    assert result.averages == 0
    assert [m.epoch for m in result.epochs] == [0]
    assert "dropped a JoinRankExited" in caplog.text


def test_an_average_that_never_closes_ends_with_a_save(monkeypatch):
    monkeypatch.setattr("flodl_fast.local.CEILING", 0.1)
    monkeypatch.setattr("flodl_fast.local.BEACON", 600)  # With it goes the look at who is silent.
    with LocalCluster(1, samples=2, batch=1, epochs=1, heartbeat_timeout=0.01) as cluster:
        rank = RawRank(cluster, 0)
        rank.step(1)
        beat = threading.Event()

        def keep_alive() -> None:
            while not beat.wait(0.002):
                rank.control.send(ff.Heartbeat(0, 1))

        beating = Running(keep_alive)
        while not isinstance(message := rank.recv(), ff.ShutdownWithSave):
            if isinstance(message, ff.RequestParams):
                rank.control.send(ff.SyncAck(0, 0, None))
        beat.set()
        beating.result()
        assert message.reason == ff.SaveReason.REDUCE_STALL
        rank.control.send(ff.Exiting(0))
        result = cluster.wait(WAIT)
        rank.close()
    assert result.reason is ff.SaveReason.REDUCE_STALL


def test_leaving_early():
    with LocalCluster(1, samples=2, batch=1, epochs=1) as cluster:
        rank = RawRank(cluster, 0)
        with pytest.raises(TimeoutError, match=r"not over in 0.01 s"):
            cluster.wait(0.01)
        waiting = Running(cluster.wait)
    with pytest.raises(ff.ChannelClosed, match="closed before its run was over"):
        waiting.result()
    with pytest.raises(ff.ChannelClosed):
        rank.leave()
    rank.close()
    with pytest.raises(ConnectionError):
        socket.create_connection(cluster.address, 1)


def test_a_dial_that_says_nothing_does_not_hold_up_the_others_or_the_end():
    with LocalCluster(1, samples=1, batch=1, epochs=1) as cluster, socket.create_connection(cluster.address):
        result, _ = finished(cluster, [start(addresses(cluster, 0), batch=1)])
    assert len(result.epochs) == 1


# ---------------------------------------------------------------------------------------------------------- settings


def test_environment():
    with LocalCluster(3, samples=3, batch=1, epochs=1, salt=f" {'ab' * 16} ") as cluster:
        assert cluster.salt == b"\xab" * 16
        port = cluster.address[1]
        assert cluster.relay_ports == (port + 4, port + 5)
        direct = Environment.read(cluster.environment(2))
        assert (direct.rank, direct.world, direct.salt, direct.device) == (2, 3, cluster.salt, 2)
        assert direct.data == direct.control == cluster.address
        relay = Environment.read(cluster.environment(0, route="relay"))
        assert (relay.data, relay.control) == (("127.0.0.1", port + 4), ("127.0.0.1", port + 5))
        assert (direct.revision, relay.revision) == (Revision.V0_6,) * 2
        with pytest.raises(ValueError, match="rank 3 is not in a world of 3"):
            cluster.environment(3)


def test_worker_from_the_environment():
    def life(rank: int, route: str) -> np.ndarray:
        params = [np.full(4, rank, f32)]
        environment = Environment.read(cluster.environment(rank, route=route))
        with Worker.from_env(params, environment=environment) as worker:
            assert params[0].tolist() == [0.0] * 4  # rank 0's, everywhere
            for plan in worker.plans():
                for _ in plan.batches(1):
                    params[0] += rank
                    worker.step(0.0)
        return params[0]

    with LocalCluster(2, samples=2, batch=1, epochs=1) as cluster:
        ranks = [Running(life, rank, route) for rank, route in enumerate(("direct", "relay"))]
        assert [rank.result().tolist() for rank in ranks] == [[0.5] * 4] * 2
        cluster.wait(WAIT)


def test_a_run_of_each_revision_in_bf16(revision):
    """Workers of the environment; at 0.7 and 0.8 in bfloat16, rounded before and after the division."""
    wire = revision != "0.6"

    def life(rank: int) -> np.ndarray:
        weight = np.zeros(3, f32)
        environment = Environment.read({**cluster.environment(rank), "FLODL_HOST_NAME": "localhost"})
        sample = ff.ResourceSample(ram_used_bytes=1)
        options = {"bf16_wire": wire, "resources": lambda: sample, "sample_resources": True}
        with Worker.from_env({"weight": weight}, environment=environment, **options) as worker:
            for plan in worker.plans():
                for _ in plan.batches(1):
                    weight += f32(1 / 3) * (rank + 1)
                    worker.step(float(rank))
        return weight

    with LocalCluster(3, samples=3, batch=1, epochs=1, revision=revision) as cluster:
        ranks = [Running(life, rank) for rank in range(3)]
        ends = [rank.result() for rank in ranks]
        result = cluster.wait(WAIT)
    frames = [np.full(3, f32(1 / 3) * (rank + 1), f32) for rank in range(3)]
    if wire:
        frames = [frame.astype(ml_dtypes.bfloat16) for frame in frames]
    average = ff.reduce_frames([ff.RoundFrame([frame], weight=1.0) for frame in frames]).tensors[0].astype(f32)
    assert [end.tolist() for end in ends] == [average.tolist()] * 3
    assert result.epochs[0].per_rank_samples == ([1, 1, 1] if wire else [])
    assert result.epochs[0].per_rank_loss == ([0.0, 1.0, 2.0] if wire else [])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
def test_ranks_of_different_models(direct):
    models = [{"weight": np.zeros(3, f32)}, {"weight": np.zeros(3, f32)}, {"weight": np.zeros((3, 1), f32)}]
    signatures = [ff.model_sig(model).hex()[:16] for model in models]
    with LocalCluster(3, samples=3, batch=1, epochs=1, revision="0.8") as cluster:
        workers = []
        for rank, model in enumerate(models):  # one after the other, so that rank 0's is the first
            options = {**addresses(cluster, rank, direct), "codec": ff.Codec(cluster.salt, "0.8")}
            workers.append(Worker(model, formation=False, **options))
        error = (
            f"rank 2 trains another model than rank 0: names, shapes or dtypes of its parameters or buffers differ "
            f"(signatures {signatures[2]}… and {signatures[0]}…)"
        )
        with pytest.raises(ff.HandshakeError, match=re.escape(error)):
            cluster.wait(WAIT)
        for worker in workers:
            with pytest.raises(ff.ChannelError):
                next(worker.plans())


@pytest.mark.parametrize(("cluster_of", "rank_of"), [("0.6", "0.8"), ("0.8", "0.6"), ("0.8", "0.7")])
def test_a_rank_of_another_revision(cluster_of, rank_of, caplog):
    with LocalCluster(1, samples=3, batch=1, epochs=1, revision=cluster_of) as cluster:
        options = {**addresses(cluster, 0, direct=False), "codec": ff.Codec(cluster.salt, rank_of)}
        with pytest.raises(ff.HandshakeError, match="or revision differ"):
            Worker({"weight": np.zeros(3, f32)}, **options)
        until(lambda: "data hello version" in caplog.text)
    assert f"revision {cluster_of} has" in caplog.text


def test_salts_are_new_each_time():
    salts = {LocalCluster(1, 1, 1, 1).salt for _ in range(8)}
    assert len(salts) == 8
    assert {len(salt) for salt in salts} == {16}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"world": 0}, "world must be at least 1, got 0"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"batch": -1}, "batch must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"evaluate_every": -1}, "evaluate_every must be at least 0"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 0"),
        ({"salt": "beef"}, "32 hex digits"),
        ({"revision": "0.5"}, "not supported"),
        ({"port": 65531}, "port must be from 0 to 65530, got 65531"),
        ({"port": -1}, "port must be from 0"),
    ],
)
def test_settings_that_cannot_be(change, error):
    with pytest.raises(ValueError, match=error):
        LocalCluster(**{"world": 1, "samples": 1, "batch": 1, "epochs": 1, **change})


def test_ports_that_are_taken():
    with LocalCluster(1, 1, 1, 1) as cluster:
        port = cluster.address[1]
        with pytest.raises(OSError, match="in use"):
            LocalCluster(1, 1, 1, 1, port=port).__enter__()
        with pytest.raises(OSError, match="in use"):
            LocalCluster(1, 1, 1, 1, port=port - 4).__enter__()


def test_a_run_by_hand_needs_nothing_but_train():
    with LocalStack("--hosts", "0", "--samples", 5, "--batch", 4, "--epochs", 1) as cluster:
        seen = train(cluster.options(0, direct=True), batch=4)
        assert cluster.lines()[-1]["avg_count"] == 1
    assert seen.picks == {0: [0, 1, 2, 3]}

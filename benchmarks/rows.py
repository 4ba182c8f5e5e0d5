"""The work that is measured, in one table: suites, report and gate all read ROWS."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np

import flodl_fast as ff

from . import rivals
from .clock import Work

REVISION = os.environ.get("FLODL_BENCH_REVISION", "0.6")
CODEC = ff.Codec(rivals.KEY, REVISION)
MIB = 1 << 20
WEIGHT = 4.0

# The first two are the messages of the crate's own bench.
BATCH = ff.Batch(3, 12.5, 0.75, 12345, param_norm=17.25, batch_loss=0.693)
_scalars = {f"metric_{i}": i * 0.5 for i in range(8)}
EPOCH = ff.EpochAggregated(
    ff.EpochMetrics(
        7, _scalars, [dict(_scalars) for _ in range(8)], 0.5, 1234.5,
        [1.0] * 8, [0.125] * 8, [9.0] * 8, [8.0] * 8, [1.0] * 8, bytes(8),
    )
)  # fmt: skip
PLAN = ff.StartEpoch(ff.EpochPlan(7, 4096, 65536))


def batches(count: int) -> list[ff.Batch]:
    """Batch messages of eight ranks, each with values of its own."""
    return [
        ff.Batch(i % 8, 12.5 + i / 64, 0.75 + i / 512, i, param_norm=17.25 + i, batch_loss=1 / (1 + i))
        for i in range(count)
    ]


def model(nbytes: int) -> np.ndarray:
    """One square float32 tensor of so many bytes, with the values that the crate's bench has."""
    side = math.isqrt(nbytes // 4)
    return (np.arange(side * side, dtype=np.int32) % 977).astype(np.float32).reshape(side, side)


def tiny(count: int) -> list[np.ndarray]:
    """Tensors of 16 floats."""
    return [np.arange(16, dtype=np.float32) + i for i in range(count)]


def touched(nbytes: int) -> np.ndarray:
    """A writable buffer whose pages are there already."""
    return np.ones(nbytes, np.uint8)


def _equal(frame: ff.RoundFrame, tensors: Sequence[np.ndarray]) -> bool:
    return frame.weight == WEIGHT and all(
        np.array_equal(got, tensor) for got, tensor in zip(frame.tensors, tensors, strict=True)
    )


# -- messages


def encode(message: Any) -> Work:
    return Work(lambda frame: CODEC.decode(frame) == message, CODEC.encode, (message,))


def decode(message: Any) -> Work:
    return Work(lambda got: got == message, CODEC.decode, (CODEC.encode(message),))


def encode_many(count: int) -> Work:
    messages = batches(count)
    return Work(lambda data: CODEC.decode_many(data) == (messages, len(data)), CODEC.encode_many, (messages,))


def decode_many(count: int) -> Work:
    messages = batches(count)
    data = CODEC.encode_many(messages)
    return Work(lambda got: got == (messages, len(data)), CODEC.decode_many, (data,))


def columns(count: int) -> Work:
    messages = batches(count)
    losses = [message.batch_loss for message in messages]
    return Work(
        lambda got: got["Batch"]["batch_loss"].tolist() == losses,
        CODEC.timing_columns,
        (CODEC.encode_many(messages),),
    )


def read_stream(count: int) -> Work:
    messages = batches(count)
    data = CODEC.encode_many(messages)

    def read() -> list[Any]:
        reader = ff.FrameReader(CODEC, "control")
        reader.feed(data)
        return list(reader)

    return Work(lambda got: got == messages, read)


def encode_mux(message: Any) -> Work:
    record = ff.MuxRecord(ff.MuxKind.DATA, 3, CODEC.encode(message))
    return Work(lambda data: CODEC.decode_mux(data) == record, CODEC.encode_mux, (record,))


def decode_mux(message: Any) -> Work:
    record = ff.MuxRecord(ff.MuxKind.DATA, 3, CODEC.encode(message))
    return Work(lambda got: got == record, CODEC.decode_mux, (CODEC.encode_mux(record),))


# -- rounds


def _frame(nbytes: int) -> ff.RoundFrame:
    return ff.RoundFrame([model(nbytes)], ff.RoundKind.MODEL, WEIGHT)


def round_into(nbytes: int) -> Work:
    frame = _frame(nbytes)
    buffer = touched(ff.TensorLayout.of(frame.tensors).frame_size)
    return Work(
        lambda size: size == len(buffer) and _equal(CODEC.decode_round(buffer), frame.tensors),
        CODEC.encode_round_into,
        (frame, buffer),
    )


def round_fresh(nbytes: int) -> Work:
    frame = _frame(nbytes)
    return Work(lambda data: _equal(CODEC.decode_round(data), frame.tensors), CODEC.encode_round, (frame,))


def round_read(nbytes: int) -> Work:
    frame = _frame(nbytes)
    return Work(lambda got: _equal(got, frame.tensors), CODEC.decode_round, (CODEC.encode_round(frame),))


def round_read_out(nbytes: int) -> Work:
    frame = _frame(nbytes)
    out = [np.ones_like(tensor) for tensor in frame.tensors]
    return Work(
        lambda got: _equal(got, frame.tensors),
        partial(CODEC.decode_round, out=out),
        (CODEC.encode_round(frame),),
    )


def round_parts(nbytes: int) -> Work:
    tensors = [model(nbytes)]
    layout = ff.TensorLayout.of(tensors)
    return Work(
        lambda parts: _equal(CODEC.decode_round(b"".join(parts)), tensors),
        layout.parts,
        (CODEC, tensors, ff.RoundKind.MODEL, WEIGHT),
    )


def layout_encode(count: int) -> Work:
    arrays = tiny(count)
    layout = ff.TensorLayout.of(arrays)
    buffer = touched(layout.frame_size)
    return Work(
        lambda size: size == len(buffer) and _equal(CODEC.decode_round(buffer), arrays),
        layout.encode,
        (CODEC, arrays, ff.RoundKind.MODEL, WEIGHT, buffer),
    )


def layout_decode(count: int) -> Work:
    arrays = tiny(count)
    layout = ff.TensorLayout.of(arrays)
    data = layout.encode(CODEC, arrays, ff.RoundKind.MODEL, WEIGHT)
    out = [np.ones_like(array) for array in arrays]
    return Work(lambda _: all(map(np.array_equal, out, arrays)), layout.decode_into, (CODEC, data, out))


@cache
def latest() -> ff.Codec:
    """A Codec of the newest revision; not made on import, for an older build that is measured may not know it."""
    return ff.Codec(rivals.KEY, "0.8")


def _half(nbytes: int) -> tuple[np.ndarray, ff.TensorLayout, np.ndarray]:
    """A float32 tensor, its layout as bfloat16, and a buffer with the frame."""
    tensor = model(nbytes)
    layout = ff.TensorLayout.of([tensor], wire="bf16")
    buffer = touched(layout.frame_size)
    layout.encode(latest(), [tensor], ff.RoundKind.MODEL, WEIGHT, buffer)
    return tensor, layout, buffer


def half_encode(nbytes: int) -> Work:
    tensor, layout, buffer = _half(nbytes)
    right = [tensor.astype(ml_dtypes.bfloat16)]
    return Work(
        lambda size: size == len(buffer) and _equal(latest().decode_round(buffer), right),
        layout.encode,
        (latest(), [tensor], ff.RoundKind.MODEL, WEIGHT, buffer),
    )


def half_decode(nbytes: int) -> Work:
    tensor, layout, buffer = _half(nbytes)
    out = np.ones_like(tensor)
    right = tensor.astype(ml_dtypes.bfloat16).astype(np.float32)
    return Work(lambda _: np.array_equal(out, right), layout.decode_into, (latest(), buffer, [out]))


def half_mac(nbytes: int) -> Work:
    _, _, buffer = _half(nbytes)
    return Work(lambda tag: tag == latest().mac(bytes(buffer)), latest().mac, (buffer,))


def host_frame(nbytes: int, together: bool) -> Work:
    """A round frame and the mux record around it, signed in one pass or one after the other."""
    tensor = model(nbytes)
    layout = ff.TensorLayout.of([tensor])
    buffer = touched(25 + layout.frame_size)
    frame = memoryview(buffer)[25:]
    expected = CODEC.encode_mux(
        ff.MuxRecord(ff.MuxKind.HOST_FRAME, payload=layout.encode(CODEC, [tensor], ff.RoundKind.MODEL, WEIGHT))
    )

    def one() -> bytes:
        layout.encode_record(CODEC, [tensor], ff.RoundKind.MODEL, WEIGHT, ff.MuxKind.HOST_FRAME, buffer)
        return bytes(buffer[17:25])

    def two() -> bytes:
        layout.encode(CODEC, [tensor], ff.RoundKind.MODEL, WEIGHT, frame)
        CODEC.mac(memoryview(buffer)[8:])
        return expected[17:25]

    return Work(lambda tag: tag == expected[17:25], one if together else two)


def host_frame_read(nbytes: int, together: bool) -> Work:
    """The way back, into the caller's array: both MACs checked in one pass or one after the other."""
    tensor = model(nbytes)
    layout = ff.TensorLayout.of([tensor])
    buffer = touched(25 + layout.frame_size)
    layout.encode_record(CODEC, [tensor], ff.RoundKind.MODEL, WEIGHT, ff.MuxKind.BROADCAST, buffer)
    frame, covered = memoryview(buffer)[25:], memoryview(buffer)[8:]
    out = np.ones_like(tensor)

    def one() -> object:
        return layout.decode_into(CODEC, buffer, [out], record=ff.MuxKind.BROADCAST)

    def two() -> object:
        CODEC.mac(covered)
        return layout.decode_into(CODEC, frame, [out])

    right = (ff.RoundKind.MODEL, WEIGHT)
    return Work(lambda got: got == right and np.array_equal(out, tensor), one if together else two)


def threads(nbytes: int, workers: int) -> Work:
    """Two rounds of so many bytes each, encoded by so many threads."""
    tensors = [model(nbytes), model(nbytes)]
    layout = ff.TensorLayout.of(tensors[:1])
    buffers = [touched(layout.frame_size) for _ in tensors]
    pool = ThreadPoolExecutor(workers)

    def encode(tensor: np.ndarray, buffer: np.ndarray) -> int:
        return layout.encode(CODEC, [tensor], ff.RoundKind.MODEL, WEIGHT, buffer)

    return Work(lambda sizes: sizes == [layout.frame_size] * 2, lambda: list(pool.map(encode, tensors, buffers)))


def parts(count: int, nbytes: int) -> list[np.ndarray]:
    """One tensor a rank, each in memory of its own; their sum in any order is exact."""
    return [model(nbytes) + rank for rank in range(count)]


def fold(count: int, nbytes: int) -> Work:
    arrays = parts(count, nbytes)
    frames = [ff.RoundFrame([array], ff.RoundKind.MODEL, WEIGHT) for array in arrays]
    return Work(lambda total: np.array_equal(total.tensors[0], sum(arrays)), ff.sum_frames, (frames,))


def fold_one_by_one(count: int, nbytes: int) -> Work:
    whole = fold(count, nbytes)
    (frames,) = whole.args

    def add() -> ff.RoundFrame:
        total = ff.RoundFold()
        for frame in frames:
            total.add(frame)
        return total.sum()

    return Work(whole.holds, add)


# -- the table


@dataclass(frozen=True)
class Row:
    """One kind of work.

    Attributes:
        name: what suites and gate call it.
        title: what the report calls it.
        work: makes its Work.
        goals: how many times as fast as whom it shall be; the report's first table has the rows with goals.
        crate: the figure of the crate's bench for one unit, as "bench.field".
        units: how many frames one call handles, where the crate's figure is for one.
        nbytes: how many bytes one call handles, where a rate says more than a time.
        rivals: who else does it; each makes its Work.
        loss: how many times the base's time the gate allows; None: not in the gate, for it takes too long.
        memory: the bytes that the result of a call takes, where the report shows what a call takes besides.
    """

    name: str
    title: str
    work: Callable[[], Work]
    goals: Mapping[str, float] = field(default_factory=dict)
    crate: str = ""
    units: int = 1
    nbytes: int = 0
    rivals: Mapping[str, Callable[[], Work]] = field(default_factory=dict)
    loss: float | None = 1.15
    memory: int | None = None


def _machine(nbytes: int) -> dict[str, Callable[[], Work]]:
    return {"hashlib": partial(rivals.hashlib_digest, nbytes), "memcpy": partial(rivals.memcpy, nbytes)}


def _big(name: str, title: str, work: Callable[[int], Work], **more: Any) -> Row:
    return Row(name, title, partial(work, BIG), nbytes=BIG, loss=None, **more)


BIG = 64 * MIB
MANY = 20_000
STEADY = 1.1  # Hashing and copying dominate there: times vary less than where objects are made.
TINY = 4096
_TINY_BYTES = ff.TensorLayout.of(tiny(TINY)).frame_size


def _saved(rival: Callable[[list[np.ndarray]], Work]) -> Callable[[], Work]:
    return lambda: rival([model(BIG)])


ROWS: tuple[Row, ...] = (
    Row(
        "batch_encode", "one Batch frame, object to bytes", partial(encode, BATCH),
        {"crate": 6.5}, "batch.encode_ns", rivals={"msgspec": partial(rivals.msgspec_encode, BATCH)},
    ),
    Row(
        "batch_decode", "one Batch frame, bytes to object", partial(decode, BATCH),
        {"crate": 5}, "batch.decode_ns", rivals={"msgspec": partial(rivals.msgspec_decode, BATCH)},
    ),
    Row(
        "columns", f"{MANY:,} Timing frames in one buffer to columns", partial(columns, MANY),
        {"crate": 12}, "batch.decode_ns", MANY,
        rivals={"msgspec": lambda: rivals.msgspec_decode_many(batches(MANY))},
    ),
    Row(
        "encode_many", f"{MANY:,} objects to one buffer", partial(encode_many, MANY),
        {"crate": 12}, "batch.encode_ns", MANY,
        rivals={"msgspec": lambda: rivals.msgspec_encode_many(batches(MANY))},
    ),
    Row(
        "decode_many", f"one buffer to {MANY:,} objects", partial(decode_many, MANY),
        {"crate": 5.5}, "batch.decode_ns", MANY,
        rivals={"msgspec": lambda: rivals.msgspec_decode_many(batches(MANY))},
    ),
    Row(
        "epoch_encode", "EpochAggregated 8 x 8, encode", partial(encode, EPOCH),
        {"crate": 3.8}, "epoch_aggregated_8x8.encode_ns",
        rivals={"msgspec": partial(rivals.msgspec_encode, EPOCH.metrics)},
    ),
    Row(
        "epoch_decode", "EpochAggregated 8 x 8, decode", partial(decode, EPOCH),
        {"crate": 2.8}, "epoch_aggregated_8x8.decode_ns",
        rivals={"msgspec": partial(rivals.msgspec_decode, EPOCH.metrics)},
    ),
    _big(
        "round_into", "64 MiB round into a given buffer", round_into, memory=0,
        goals={"crate": 5.2, "hashlib": 0.97}, crate="round_64MiB_1x.encode_us",
        rivals={
            "safetensors": _saved(rivals.safetensors_encode), "Arrow": _saved(rivals.arrow_encode),
            **_machine(BIG),
        },
    ),
    _big(
        "round_fresh", "64 MiB round as fresh bytes", round_fresh, memory=BIG,
        goals={"crate": 5}, crate="round_64MiB_1x.encode_us",
        rivals={"safetensors": _saved(rivals.safetensors_encode), **_machine(BIG)},
    ),
    _big("round_parts", "64 MiB round as parts to send, not joined", round_parts, memory=0),
    _big("round_read", "64 MiB round into fresh arrays", round_read, memory=BIG),
    _big(
        "round_read_out", "64 MiB round into the caller's arrays", round_read_out, memory=0,
        goals={"crate": 5.8, "hashlib": 0.95}, crate="round_64MiB_1x.decode_us",
        rivals={
            "safetensors": _saved(rivals.safetensors_decode), "Arrow": _saved(rivals.arrow_decode),
            **_machine(BIG),
        },
    ),
    Row(
        "tiny_encode", f"{TINY:,} tensors of 16 floats with a kept layout, encode",
        partial(layout_encode, TINY), {"crate": 4.7}, "round_4096_tiny.encode_us", loss=STEADY,
        rivals={
            "safetensors": lambda: rivals.safetensors_encode(tiny(TINY)),
            "Arrow": lambda: rivals.arrow_encode(tiny(TINY)), **_machine(_TINY_BYTES),
        },
    ),
    Row(
        "tiny_decode", f"{TINY:,} tensors of 16 floats with a kept layout, decode",
        partial(layout_decode, TINY), {"crate": 6}, "round_4096_tiny.decode_us", loss=STEADY,
        rivals={
            "safetensors": lambda: rivals.safetensors_decode(tiny(TINY)),
            "Arrow": lambda: rivals.arrow_decode(tiny(TINY)), **_machine(_TINY_BYTES),
        },
    ),
    Row(
        "sum_64MiB", "sum of four frames of 64 MiB", partial(fold, 4, BIG),
        {"crate": 18, "NumPy": 1.1}, "round_64MiB_1x.sum4_GBps_in", nbytes=4 * BIG,
        rivals={"NumPy": lambda: rivals.numpy_sum(parts(4, BIG))}, loss=None, memory=BIG,
    ),
    Row(
        "sum_64KiB", "sum of four frames of 64 KiB", partial(fold, 4, MIB // 16),
        {"NumPy": 1.5}, "round_64KiB_1x.sum4_GBps_in", nbytes=4 * MIB // 16,
        rivals={"NumPy": lambda: rivals.numpy_sum(parts(4, MIB // 16))},
    ),
    _big(
        "half_encode", "64 MiB of float32 to a bfloat16 round", half_encode, memory=0, goals={"MAC": 0.9},
        rivals={"MAC": partial(half_mac, BIG)},
    ),
    _big(
        "half_decode", "a bfloat16 round to 64 MiB of float32", half_decode, memory=0, goals={"MAC": 0.9},
        rivals={"MAC": partial(half_mac, BIG)},
    ),
    _big(
        "host_frame", "64 MiB round inside its mux record", partial(host_frame, together=True), memory=0,
        goals={"two passes": 1.6}, rivals={"two passes": partial(host_frame, BIG, False)},
    ),
    _big(
        "host_frame_read", "read a 64 MiB round inside its mux record", partial(host_frame_read, together=True),
        memory=0, goals={"two passes": 1.6}, rivals={"two passes": partial(host_frame_read, BIG, False)},
    ),
    _big(
        "threads", "two rounds of 64 MiB by two threads", partial(threads, workers=2),
        goals={"one thread": 1.8}, rivals={"one thread": partial(threads, BIG, 1)},
    ),
    # What the gate watches besides.
    Row("round_1MiB_into", "1 MiB round into a given buffer", partial(round_into, MIB), loss=STEADY),
    Row("round_1MiB_out", "1 MiB round into the caller's arrays", partial(round_read_out, MIB), loss=STEADY),
    Row("fold_64KiB", "four frames of 64 KiB into a RoundFold", partial(fold_one_by_one, 4, MIB // 16)),
    Row("read_stream", "1,000 frames through a FrameReader", partial(read_stream, 1000)),
    Row("mux_encode", "a mux record of one frame, encode", partial(encode_mux, BATCH)),
    Row("mux_decode", "a mux record of one frame, decode", partial(decode_mux, BATCH)),
    Row(
        "convert", "StartEpoch from the wire's form to the crate's in-process form",
        lambda: Work(lambda got: got == PLAN, ff.control_wire_to_msg, (PLAN,)),
    ),
)  # fmt: skip


def works() -> dict[str, Callable[[], Work]]:
    """Every Work of the table: "row" is ours, "row/rival" a rival's."""
    found = {}
    for row in ROWS:
        found[row.name] = row.work
        found |= {f"{row.name}/{name}": work for name, work in row.rivals.items()}
    return found

"""``python -m flodl_fast bench``: what this machine does, beside what hashing and copying take there.

A few seconds for a look. Comparisons with the crate and with other libraries are `make bench` of a checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from timeit import Timer
from typing import Any

import numpy as np

from ._codec import sha256_kernel
from ._round import fold_kernel
from .console import missing, print_table, rich_console, size_text, to_text
from .frames import Codec
from .messages import Batch, EpochAggregated, EpochMetrics
from .protocol import RoundKind
from .rounds import RoundFrame, TensorLayout, reduce_frames

__all__ = ["add_arguments", "run"]

SIZES = tuple(1 << n for n in range(12, 27, 2))  # bytes of tensors in a frame: 4 KiB to 64 MiB
FOLDED = 4  # frames in a sum
_WINDOWS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, and frames of up to 1 MiB")
    parser.add_argument("--plot", metavar="PNG", help="draw rates over frame size")
    parser.add_argument("--json", action="store_true", help="print a JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Measure, print and return the exit code."""
    if args.plot is not None and find_spec("matplotlib") is None:
        return missing("matplotlib", "plot")
    seconds = 0.01 if args.quick else 0.1
    sizes = [size for size in SIZES if not args.quick or size <= 1 << 20]
    codec = Codec(bytes(16))
    messages = list(_messages(codec))
    rounds = {size: list(_rounds(codec, size)) for size in sizes}
    with _progress(len(messages) + sum(map(len, rounds.values()))) as advance:
        nanoseconds = {name: advance(_least(call, seconds) / n * 1e9) for name, call, n in messages}
        rates: dict[str, list[float]] = {}
        for size in sizes:
            for name, call, nbytes in rounds.pop(size):  # its buffers go with it
                rates.setdefault(name, []).append(advance(nbytes / _least(call, seconds) / 1e9))
    kernels = {"sha256": sha256_kernel()[0], "fold": fold_kernel()[0]}
    if args.json:
        print(to_text({"kernels": kernels, "messages_ns": nanoseconds, "sizes": sizes, "rounds_gb_per_s": rates}))
    else:
        print(f"kernels: SHA-256 {kernels['sha256']}, fold {kernels['fold']}")
        rows = [(name, f"{value:,.0f}") for name, value in nanoseconds.items()]
        print_table("Control messages", ["work", " ns each"], rows)
        columns = ["GB/s", *(f" {size_text(size)}" for size in sizes)]
        print_table(
            "Round frames, over the bytes of their tensors", columns,
            [(name, *(f"{rate:.2f}" for rate in values)) for name, values in rates.items()],
        )
    if args.plot is not None:
        from .plots import plot_rates

        plot_rates(sizes, rates, args.plot)
    return 0


def _messages(codec: Codec) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """What is done to control messages: its name, a call, and how many messages that is."""
    batch = Batch(3, 12.5, 0.75, 1000, None, 0.693)
    ranks = [float(rank) for rank in range(8)]
    scalars = {f"metric_{i}": float(i) for i in range(8)}
    epoch = EpochAggregated(
        EpochMetrics(7, scalars, [scalars] * 8, 0.5, 1e3, ranks, ranks, ranks, ranks, ranks, bytes(8))
    )
    for name, message in (("Batch", batch), ("EpochAggregated, 8 ranks", epoch)):
        frame = codec.encode(message)
        yield f"{name}: encode", partial(codec.encode, message), 1
        yield f"{name}: decode", partial(codec.decode, frame), 1
    many = [batch] * 10_000
    stream = codec.encode_many(many)
    yield "10,000 Batches at once: encode", partial(codec.encode_many, many), len(many)
    yield "10,000 Batches at once: decode", partial(codec.decode_many, stream), len(many)
    yield "10,000 Batches at once: columns", partial(codec.timing_columns, stream), len(many)
    yield "MAC of a Batch frame", partial(codec.mac, codec.encode(batch)), 1


def _rounds(codec: Codec, size: int) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """What is done to a round frame of this size: its name, a call, and the bytes it goes through."""
    tensor = np.ones(size // 4, np.float32)
    layout = TensorLayout.of([tensor])
    buffer = bytearray(layout.frame_size)
    target = np.empty_like(tensor)
    layout.encode(codec, [tensor], RoundKind.MODEL, 1.0, out=buffer)
    frames = [RoundFrame([tensor + np.float32(n)], RoundKind.MODEL, 1.0) for n in range(FOLDED)]
    yield "encode into a buffer", partial(layout.encode, codec, [tensor], RoundKind.MODEL, 1.0, buffer), size
    yield "decode into arrays", partial(layout.decode_into, codec, bytes(buffer), [target]), size
    yield "MAC", partial(codec.mac, buffer), size
    yield f"average of {FOLDED} frames", partial(reduce_frames, frames), FOLDED * size
    yield "hashlib.sha256", lambda: hashlib.sha256(buffer).digest(), size
    yield "memcpy", partial(np.copyto, target, tensor), size


def _least(call: Callable[[], Any], seconds: float) -> float:
    """The seconds that a call takes: the mean over a window of so many seconds, the least of several."""
    timer = Timer(call)
    number = 1
    while (took := timer.timeit(number)) < seconds / 10:
        number *= 4
    number = max(1, round(number * seconds / took))
    return min(timer.repeat(_WINDOWS, number)) / number


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[float], float]]:
    """Shows how far the measuring is on a terminal; what it gives passes a figure on, and counts it."""
    console = rich_console()
    if console is None:
        done = 0

        def advance(value: float) -> float:
            nonlocal done
            done += 1
            if sys.stderr.isatty():
                print(f"\r{done} of {steps}", end="\n" if done == steps else "", file=sys.stderr, flush=True)
            return value

        yield advance
        return
    from rich.progress import Progress

    with Progress(console=type(console)(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=steps)

        def show(value: float) -> float:
            bar.advance(task)
            return value

        yield show

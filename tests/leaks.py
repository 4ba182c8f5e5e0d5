"""Failing calls by the hundred thousand leave nothing behind: ``python leaks.py [CALLS]`` (200,000 unless given).

Every kind of decode, of damaged frames of every kind, and every kind of encode, of values that have no place on the
wire, over and over; then resident memory, allocated blocks and, where this is a debug build of CPython, the number of
all references are what they were. The exit code is 1 where they are not. References are not counted where NumPy
makes arrays, as a release build of it does not take part in the count: ``np.zeros`` alone seems to leave one behind.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from conftest import golden
from fuzz.targets import CODECS, SIGN, bodies_of
from generate import damage
from support import MESSAGE_FILES, resident

import flodl_fast as ff

TURN = 1_000  # failing calls of a kind in a turn, the same in each
SLACK = {"resident bytes": 1 << 20, "allocated blocks": 250, "references": 50}  # of the interpreter itself

Call = Callable[[], Any]

FRAMES = {"columns": "control"}  # what is read in another way than as itself
BODIES = {
    (codec.revision.value, kind): list(bodies_of(kind, codec.revision.value)) for codec in CODECS for kind in SIGN
}


def fails(call: Call) -> bool:
    try:
        call()
    except (ff.FlodlError, TypeError, ValueError):
        return True
    return False


def reads(codec: ff.Codec, kind: str, data: bytes) -> list[Call]:
    """Every way to read a frame; columns are a way of their own."""
    def stream() -> None:
        reader = ff.FrameReader(codec, FRAMES.get(kind, kind), trailing="error")
        reader.feed(data)
        reader.next()
        reader.eof()

    into = [np.zeros((2, 3), np.float32)]
    return [stream, *{
        "control": (
            lambda: codec.decode(data), lambda: codec.decode_many(data), lambda: codec.decode(data, trailing="error"),
        ),
        "columns": (lambda: codec.timing_columns(data),),
        "round": (
            lambda: codec.decode_round(data), lambda: codec.decode_round(data, copy=False),
            lambda: codec.decode_round(data, out=into), lambda: ff.TensorLayout.from_frame(codec, data),
            lambda: ff.TensorLayout.of(into).decode_into(codec, data, into),
        ),
        "mux": (lambda: codec.decode_mux(data),),
    }[kind]]


def damaged(rng: random.Random, kinds: Sequence[str]) -> Iterator[Call]:
    """Reads of damaged frames, most of them with a MAC that holds."""
    while True:
        codec, kind = rng.choice(CODECS), rng.choice(kinds)
        made = FRAMES.get(kind, kind)
        data = SIGN[made](codec, damage(rng, rng.choice(BODIES[codec.revision.value, made]) or b"\0"))
        yield rng.choice(reads(codec, kind, damage(rng, data) if rng.random() < 0.3 else data))


def unfit_messages(rng: random.Random) -> Iterator[Call]:
    """Encodes of messages with a value in one field that may have no place there."""
    codec = CODECS[0]
    odd = [2**64, -1, 1.5, "text", "\ud800", b"x", [1, "x"], {"a": "b"}, {"\ud800": (1.0, 1)}, object(), 1j, None]
    cases = [case for name in MESSAGE_FILES for case in golden(name)]
    while True:
        case = rng.choice(cases)
        message = codec.decode_payload(case["kind"], bytes.fromhex(case["payload"]))
        fields = dataclasses.fields(message)
        if fields:
            setattr(message, rng.choice(fields).name, rng.choice(odd))
            yield rng.choice([
                lambda message=message: codec.encode(message), lambda message=message: codec.encode_payload(message),
                lambda message=message: codec.encode_many([ff.SyncNow(), message]),
                lambda message=message: codec.encode_into(message, bytearray(5000)),
            ])


def unfit_rounds(rng: random.Random) -> Iterator[Call]:
    """Encodes and sums of frames of which something does not fit."""
    codec, good = CODECS[0], np.ones(1000, np.float32)
    bad = ff.RoundFrame([good, good])
    bad.tensors[1] = np.ones(3)
    layout = ff.TensorLayout.of([good])
    while True:
        yield rng.choice([
            lambda: codec.encode_round(bad), lambda: ff.RoundFrame([good, np.ones(3)]),
            lambda: ff.sum_frames([ff.RoundFrame([good]), ff.RoundFrame([good[1:]])]),
            lambda: codec.encode_round_into(ff.RoundFrame([good]), bytearray(100)),
            lambda: layout.encode(codec, [good[1:]], ff.RoundKind.MODEL, 1.0),
            lambda: codec.encode_round(ff.RoundFrame([good], weight=-1.0)),
        ])


def counted() -> dict[str, int]:
    """What must not grow."""
    gc.collect()  # an error and its traceback can hold each other
    counts = {
        "allocated blocks": sys.getallocatedblocks(),
        "resident bytes": resident(),
    }
    if hasattr(sys, "gettotalrefcount"):
        counts["references"] = sys.gettotalrefcount()
    return counts


def run(calls: list[Call], times: int) -> dict[str, tuple[int, int]]:
    """What there was before and after so many of these calls."""
    for _ in range(3):  # caches and pools fill up
        for call in calls:
            fails(call)
    before = counted()
    for _ in range(times // len(calls)):
        for call in calls:
            fails(call)
    after = counted()
    return {name: (before[name], after[name]) for name in before}


def main() -> int:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    rng, grown = random.Random(7), False
    sources = {
        "decoding messages": damaged(rng, ("control", "mux")), "encoding messages": unfit_messages(rng),
        "decoding arrays": damaged(rng, ("round", "columns")), "encoding arrays": unfit_rounds(rng),
    }
    for what, source in sources.items():
        calls = list(islice(filter(fails, source), TURN))
        for name, (before, after) in run(calls, times // len(sources)).items():
            if name == "references" and "arrays" in what:
                continue
            grown |= after - before > SLACK[name]
            print(f"{what}, {times // len(sources):,} failures: {name} {before:,} before, {after:,} after", flush=True)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

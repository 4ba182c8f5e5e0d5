"""Seeded random input for the tests, drawn from the oracle's schema: the same seed gives the same input."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from typing import Any

from reference import LIMITS, SCHEMA, SCHEMAS, UNIT, Array, Enum, Json, Map, Opt, Tuple, Vec, single

FRAME_KINDS = tuple(kind for kind in SCHEMA if kind != "Relay")

# Both sides of every width of a varint, of a sign, and of what a double holds exactly.
EDGES = (
    0, 1, 2, 127, 128, 250, 251, 252, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)
SIGNED_EDGES = (0, 1, -1, 9, -9, 124, 125, -125, -126, 137, 32767, -32768, 32768, (1 << 31) - 1, -1 << 31)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.1, math.pi, 5e-324, 1e-310, -1e-310, 1e16, 1.7976931348623157e308)
FLOATS_32 = (0.0, -0.0, 1.0, 99.5, 1e-45, -1e-40, 1.1754943508222875e-38, 3.4028234663852886e38)
NOT_FINITE = (math.nan, -math.nan, math.inf, -math.inf)
TEXTS = (
    "", "loss", "host-0", "é", "日本語", "🦀 crab", "\0", "line\nbreak", "\x7f\x80",
    "\u2028\ufeff\uffff", "\U0010ffff", "a" * 250, "b" * 251, "é" * 150,
)
LETTERS = "abcXYZ019 _-/{}\"\\\t\0éßж語🦀\ud7ff\ue000"


class _Maker:
    def __init__(self, seed: int, finite: bool, entries: int):
        self.rng, self.finite, self.entries = random.Random(seed), finite, entries

    def integer(self, edges: tuple[int, ...], low: int, end: int) -> int:
        if self.rng.random() < 0.5:
            return self.rng.choice([edge for edge in edges if low <= edge < end])
        return self.rng.randrange(low, end) >> self.rng.randrange((end - low - 1).bit_length())

    def number(self, special: tuple[float, ...]) -> float:
        chance = self.rng.random()
        if chance < 0.1 and not self.finite:
            return self.rng.choice(NOT_FINITE)
        return self.rng.choice(special) if chance < 0.5 else self.rng.gauss(0, 300)

    def text(self) -> str:
        chance = self.rng.random()
        if chance < 0.5:
            return self.rng.choice(TEXTS)
        size = 70000 if chance > 0.999 else self.rng.randint(1, 40)
        return "".join(self.rng.choices(LETTERS, k=size))

    def length(self) -> int:
        return self.rng.choice((250, 251, 300) if self.rng.random() < 0.03 else (0, 1, 2, 3, 8))

    def make(self, of: Any) -> Json:
        match of:
            case "i32":
                return self.integer(SIGNED_EDGES, -1 << 31, 1 << 31)
            case "f32":
                return single(self.number(FLOATS_32))
            case "f64":
                return self.number(FLOATS)
            case "text":
                return self.text()
            case str():
                return self.integer(EDGES, 0, LIMITS[of])
            case Opt(inner):
                return self.make(inner) if self.rng.random() < 0.6 else None
            case Vec("u8"):
                return list(self.rng.randbytes(self.rng.choice((self.length(), 128))))
            case Vec(inner):
                return [self.make(inner) for _ in range(self.length())]
            case Map(inner):
                return {self.text(): self.make(inner) for _ in range(self.rng.randint(0, self.entries))}
            case Array("u8", size):
                return list(self.rng.randbytes(size))
            case Tuple(inner):
                return [self.make(part) for part in inner]
            case Enum(variants):
                return self.variant(of, self.rng.choice(list(variants)))
            case _:
                return {name: self.make(inner) for name, inner in of.items()}

    def variant(self, of: Enum, name: str) -> Json:
        return name if of.variants[name] == UNIT else {name: self.make(of.variants[name])}


def messages(
    seed: int,
    n: int,
    *,
    finite: bool = False,
    entries: int = 1,
    kinds: tuple[str, ...] = FRAME_KINDS,
    revision: str = "0.6",
) -> Iterator[tuple[str, Json]]:
    """`n` pairs of kind and message; every variant that these kinds have at the revision in turn.

    `finite` leaves out NaN and the infinities, which JSON cannot carry. A map has at most `entries` entries:
    beyond one the crate writes them in an order of its own.
    """
    maker, schema = _Maker(seed, finite, entries), SCHEMAS[revision]
    turns: list[tuple[str, str | None]] = []
    for kind in kinds:
        of = schema[kind]
        turns += [(kind, name) for name in of.variants] if isinstance(of, Enum) else [(kind, None)]
    for i in range(n):
        kind, name = turns[i % len(turns)]
        yield kind, maker.make(schema[kind]) if name is None else maker.variant(schema[kind], name)


def salts(seed: int, n: int) -> Iterator[bytes]:
    """`n` session salts; the first ones all zeros and all ones."""
    rng = random.Random(seed)
    for i in range(n):
        yield bytes([i * 255] * 16) if i < 2 else rng.randbytes(16)


SHAPES: tuple[list[int], ...] = (
    [], [0], [1], [3], [7], [16], [300], [2, 3], [0, 5], [4, 1, 2], [2, 0, (1 << 32) - 1], [2, 2, 2, 2],
    [1] * 255,
)
WEIGHTS = (0.0, -0.0, 5e-324, 0.001, 0.5, 1.0, 3.0, 17.25, 9007199254740993.0, 1e300, 1.7976931348623157e308)
WORDS = (
    *(struct.pack("<f", value) for value in (*FLOATS_32, -1.0, 1e8, -1e8, 0.1)),
    *(bytes.fromhex(word) for word in ("0000807f", "000080ff", "0000c07f", "0100807f", "efbeadff")),
)


def _values(rng: random.Random, count: int) -> bytes:
    share = rng.choice((0, 0, 0.3))
    return b"".join(
        rng.choice(WORDS) if rng.random() < share else struct.pack("<f", rng.gauss(0, 2))
        for _ in range(count)
    )


def _shapes(rng: random.Random) -> list[list[int]]:
    return [rng.choice(SHAPES) for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 20)))]


def _dtypes(rng: random.Random, shapes: list[list[int]], revision: str) -> list[int]:
    return [rng.choice((0, 0, 1)) if revision > "0.6" else 0 for _ in shapes]


def _frame(rng: random.Random, kind: str, shapes: list[list[int]], dtypes: list[int], revision: str) -> Json:
    tensors = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        data = _values(rng, math.prod(shape))
        if dtype:  # The upper halves, every other one from a word's lower half.
            data = b"".join(data[at + 2 * (at % 8 == 0):][:2] for at in range(0, len(data), 4))
        if revision == "0.8" and rng.random() < 0.3:
            data = b""
        tensors.append({"dtype": dtype, "shape": list(shape), "bytes": data.hex()})
    weight = rng.choice(WEIGHTS) if rng.random() < 0.7 else rng.uniform(0, 100)
    return {"kind": kind, "weight": weight, "tensors": tensors}


def round_frames(seed: int, n: int, revision: str = "0.6") -> Iterator[Json]:
    """`n` round frames with what the revision has; values include NaN, the infinities and subnormals."""
    rng = random.Random(seed)
    for _ in range(n):
        kind, shapes = rng.choice(("Model", "Control")), _shapes(rng)
        yield _frame(rng, kind, shapes, _dtypes(rng, shapes, revision), revision)


def round_groups(seed: int, n: int, revision: str = "0.6") -> Iterator[list[Json]]:
    """`n` lists of round frames to sum or reduce, with what the revision has.

    About one list in six disagrees in kind, count, shape or dtype; in one of five all weights are the same, so that
    totals of 0 and -0.0 occur.
    """
    rng = random.Random(seed)
    for _ in range(n):
        kind, shapes = rng.choice(("Model", "Model", "Control")), _shapes(rng)
        dtypes = _dtypes(rng, shapes, revision)
        group = [_frame(rng, kind, shapes, dtypes, revision) for _ in range(rng.choice((1, 2, 2, 3, 4)))]
        if rng.random() < 0.2:
            group = [{**frame, "weight": group[0]["weight"]} for frame in group]
        match rng.randrange(18):
            case 0:
                group.append(_frame(rng, "Control" if kind == "Model" else "Model", shapes, dtypes, revision))
            case 1:
                group.append(_frame(rng, kind, [*shapes, [1]], [*dtypes, 0], revision))
            case 2 if shapes:
                group.append(_frame(rng, kind, [*shapes[:-1], [*shapes[-1], 1]], dtypes, revision))
            case 3 if shapes and revision > "0.6":
                group.append(_frame(rng, kind, shapes, [*dtypes[:-1], 1 - dtypes[-1]], revision))
        yield group


def damage(rng: random.Random, data: bytes) -> bytes:
    """`data` with a byte changed, cut short or grown."""
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data + rng.randbytes(3)
        case _:
            byte = rng.choice((0, 1, 2, 0x14, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF, rng.randrange(256)))
            return data[:at] + bytes([byte]) + data[at + 1:]


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """`data` spliced with the end of another input, with bytes doubled, put in or moved, or damaged."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0:
            return data[:at] + other[at:]
        case 1:
            return data[:at] + data[at // 2:]
        case 2:
            return data[:at] + bytes([rng.choice((251, 252, 253))]) + data[at:]
        case 3:
            return data[at:] + data[:at]
        case _:
            return damage(rng, data or b"?")

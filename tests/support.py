"""What the tests of messages and frames share: messages in the oracle's form, fresh MACs, damage, odd values."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import reference as ref
from conftest import SALT
from generate import messages

import flodl_fast as ff

CODEC = ff.Codec(SALT)
MESSAGE_FILES = ("control", "timing", "metrics", "rendezvous", "join")

# Fields that older revisions do not have; no other field has their names.
LATER = {
    "per_rank_loss": "0.7", "per_rank_samples": "0.7", "run_id": "0.8", "nccl_version": "0.8", "model_sig": "0.8",
    "model_sigs": "0.8",
}
UNIONS = {
    "Control": ff.ControlMsg, "Timing": ff.TimingMsg, "Rendezvous": ff.RendezvousMsg, "Join": ff.JoinMsg,
    "Relay": ff.RelayMsg,
}


def classes(union: Any) -> list[type]:
    """The message classes of a union, in index order; those of later revisions are annotated."""
    return [getattr(variant, "__origin__", variant) for variant in get_args(union)]


KIND_OF = {cls: kind for kind, union in UNIONS.items() for cls in classes(union)} | {ff.MetricsMsg: "Metrics"}
NUMBER_OF = {name: number for number, name in ref.KINDS.items()}


def codec_at(revision: str) -> ff.Codec:
    return CODEC if revision == "0.6" else ff.Codec(SALT, revision)


def bare(value: Any, revision: str = "0.6") -> Any:
    """A field's value as the oracle has it."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if LATER.get(field.name, revision) <= revision]
        return {name: bare(getattr(value, name), revision) for name in names}
    if isinstance(value, enum.IntEnum):
        return value.name.title().replace("_", "")
    if isinstance(value, (list, tuple, bytes)):
        return [bare(item, revision) for item in value]
    if isinstance(value, dict):
        return {key: bare(item, revision) for key, item in value.items()}
    return value


def crate_name(cls: type) -> str:
    """A variant's name in the crate."""
    return cls.__name__.removeprefix(KIND_OF[cls]).removesuffix("Msg")


def oracle_form(message: Any, revision: str = "0.6") -> tuple[str, Any]:
    """Kind and value of a message as the oracle has them: JSON, but for NaN and the infinities."""
    kind, fields = KIND_OF[type(message)], bare(message, revision)
    if kind == "Metrics":
        return kind, fields
    name = crate_name(type(message))
    layout = ref.SCHEMAS[revision][kind].variants[name]
    if layout == ref.UNIT:
        return kind, name
    wraps = isinstance(layout, ref.Enum) or list(layout) != list(fields)
    return kind, {name: next(iter(fields.values())) if wraps else fields}


def drawn(seed: int, n: int, revision: str = "0.6", **options: Any) -> list[Any]:
    """`n` generated messages, every variant in turn; the options are those of generate.messages."""
    drawn = messages(seed, n, revision=revision, **options)
    return [ff.from_json(kind, value, revision=revision) for kind, value in drawn]


def one_of_each(seed: int = 0, revision: str = "0.6", **options: Any) -> list[Any]:
    """One generated message of every class that a payload can be at the revision, Relay's included."""
    count = 1 + sum(len(of.variants) for of in ref.SCHEMAS[revision].values() if isinstance(of, ref.Enum))
    return drawn(seed, count, revision, kinds=tuple(ref.SCHEMA), **options)


def signed_frame(kind: int, payload: bytes, revision: str = "0.6") -> bytes:
    """A control frame whose MAC holds, whatever the payload."""
    return ref.sign_frame(SALT, kind, payload, revision)


def signed_record(kind: int, payload: bytes, rank: int = 0) -> bytes:
    """A mux record whose MAC holds, whatever its kind and payload."""
    header = struct.pack("<IIBII", ref.MUX_RECORD, ref.MUX_VERSION, kind, rank, len(payload))
    return header + ref.mac8(SALT, header + payload) + payload


class Scalar:
    """A zero-dimensional tensor of a library that the package does not know."""

    def __init__(self, value: Any, dtype: str, shape: tuple[int, ...] | None = ()):
        self.value, self.dtype, self.shape = value, dtype, shape

    def __index__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r}, {self.dtype!r}, {self.shape!r})"


class Hook(Scalar):
    """An integer that runs something while it is encoded."""

    def __init__(self, run: Any, value: int = 7):
        super().__init__(value, "int64")
        self.run = run

    def __index__(self) -> int:
        self.run()
        return self.value


def resident() -> int:
    """The bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12


def check_that_nothing_is_left(calls: Iterable[Callable[[], object]], held: Sequence[object]) -> None:
    """200,000 calls in turn, each of which fails: memory stays as it is, and nobody holds what they were given."""
    calls = list(calls)

    def fail(times: int) -> int:
        failed = 0
        for call in itertools.islice(itertools.cycle(calls), times):
            try:
                call()
            except (ff.FlodlError, TypeError):
                failed += 1
        return failed

    assert fail(20_000) == 20_000
    counts, before = [sys.getrefcount(thing) for thing in held], resident()
    assert fail(200_000) == 200_000
    assert [sys.getrefcount(thing) for thing in held] == counts
    # 200,000 leaks of the least that an allocator gives out, 16 bytes, would be above this.
    assert resident() - before < 2 << 20

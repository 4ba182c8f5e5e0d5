"""Run as a program: a package whose Timing has grown in imagined later revisions answers expressions.

A layout is compiled once a process and revision, so that messages of another day need a process of their own.
Reads a JSON list of expressions; writes a JSON list of their values as text, or of the errors they raise.
"""

import json
import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Union, get_args, get_origin

import flodl_fast as ff
from flodl_fast import messages
from flodl_fast.layout import Opt, Since, f32, f64, i32, u8, u32, u64


@dataclass(slots=True)
class Part:
    number: u64
    late: Annotated[list[f64], Since("0.7")] = field(default_factory=list)


@dataclass(slots=True)
class Grown:
    rank: u64
    parts: list[Part] = field(default_factory=list)
    norm: Annotated[Opt[f64], Since("0.7")] = None
    losses: Annotated[list[Opt[f64]], Since("0.7")] = field(default_factory=list)
    named: Annotated[dict[str, f64], Since("0.8")] = field(default_factory=dict)


@dataclass(slots=True)
class Numbers:
    rank: u64
    norm: Annotated[Opt[f64], Since("0.7")] = None
    small: u8 = 0
    wide: u32 = 0
    signed: i32 = 0
    single: f32 = 0.0
    maybe: Opt[f32] = None


@dataclass(slots=True)
class New:
    rank: u64


class Gap(IntEnum):
    FIRST = 0
    THIRD = 2


@dataclass(slots=True)
class Gapped:
    gap: Gap


@dataclass
class Loose:
    rank: u64


def outcome(expression: str) -> str:
    try:
        return str(eval(expression))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    questions = json.load(sys.stdin)
    kind, union = messages.PAYLOADS["Timing"]
    union = Union[tuple(variant for variant in get_args(union) if get_origin(variant) is not Annotated)]
    if len(sys.argv) > 1:  # the name of a class that no layout can be made of
        messages.PAYLOADS["Timing"] = kind, Union[union, globals()[sys.argv[1]]]
    else:
        messages.PAYLOADS["Timing"] = kind, Union[union, Grown, Numbers, Annotated[New, Since("0.7")]]
        old, mid, new = (ff.Codec(bytes(16), revision) for revision in ("0.6", "0.7", "0.8"))
    json.dump([outcome(question) for question in questions], sys.stdout)

"""Messages in the crate's JSON form, as its serde derives write it.

A variant without fields is its name; one with fields ``{"Heartbeat": {"rank": 3, "step_count": 1000}}``; one that wraps
a struct or enum ``{"StartEpoch": {...}}``. Pairs are lists of two, bytes lists of numbers. JSON has no NaN or infinity:
both are written as null, and null is refused for a number when read back.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from functools import cache
from typing import Any, Literal, overload

from ._codec import family_name
from .errors import EncodeError, UnknownKindError
from .layout import Shape, struct_of, variants_of
from .messages import PAYLOADS, ControlMsg, JoinMsg, MetricsMsg, RelayMsg, RendezvousMsg, TimingMsg
from .protocol import MsgKind, Revision, supported_revision

__all__ = ["from_json", "to_json"]

_RANGES = {"u8": (0, 2**8), "u16": (0, 2**16), "u32": (0, 2**32), "u64": (0, 2**64), "i32": (-(2**31), 2**31)}


def to_json(message: Any, *, revision: Revision | str = "0.6") -> Any:
    """The JSON value of a message: dicts, lists, text and numbers, as ``json`` takes them.

    Args:
        message: any message of the wire.
        revision: whose fields and variants count.

    Raises:
        TypeError: not a message of the revision.
    """
    revision = supported_revision(revision)
    classes = _by_class(revision)
    found = next((classes[base] for base in type(message).__mro__ if base in classes), None)
    if found is None:
        raise TypeError(f"{type(message).__name__} is not a message of revision {revision.value}")
    name, shape = found
    if name is None:
        return _write(shape, message, revision)
    if not shape.parts:
        return name
    return {name: _write(_inner(shape), getattr(message, shape.names[0]) if _wraps(shape) else message, revision)}


@overload
def from_json(
    kind: Literal[MsgKind.CONTROL, "Control"], value: Any, *, revision: Revision | str = "0.6"
) -> ControlMsg: ...
@overload
def from_json(
    kind: Literal[MsgKind.TIMING, "Timing"], value: Any, *, revision: Revision | str = "0.6"
) -> TimingMsg: ...
@overload
def from_json(
    kind: Literal[MsgKind.METRICS, "Metrics"], value: Any, *, revision: Revision | str = "0.6"
) -> MetricsMsg: ...
@overload
def from_json(
    kind: Literal[MsgKind.RENDEZVOUS, "Rendezvous"], value: Any, *, revision: Revision | str = "0.6"
) -> RendezvousMsg: ...
@overload
def from_json(kind: Literal[MsgKind.JOIN, "Join"], value: Any, *, revision: Revision | str = "0.6") -> JoinMsg: ...
@overload
def from_json(kind: Literal["Relay"], value: Any, *, revision: Revision | str = "0.6") -> RelayMsg: ...
@overload
def from_json(kind: MsgKind | int | str, value: Any, *, revision: Revision | str = "0.6") -> Any: ...
def from_json(kind: Any, value: Any, *, revision: Revision | str = "0.6") -> Any:
    """The message that a JSON value stands for.

    Args:
        kind: a MsgKind, its number, or its name; "Relay" for a RelayMsg.
        value: as ``to_json`` gives it. Unknown fields are ignored, a missing optional one is None.
        revision: whose fields and variants count.

    Raises:
        UnknownKindError: a kind that carries no message.
        EncodeError: a value that the message cannot hold; the message names the field.
    """
    revision = supported_revision(revision)
    family = family_name(kind)
    if family not in PAYLOADS:
        raise UnknownKindError(f"kind {family} is reserved and carries no message")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        raise EncodeError("expected JSON as Python objects, got its text: give what json.loads makes of it")
    variants = _by_name(family, revision)
    if None in variants:
        return _read(variants[None], value, revision, "")
    name, body = (value, None) if isinstance(value, str) else _only_item(value)
    if name not in variants:
        raise EncodeError(f"unknown variant {name!r}, expected one of {list(variants)}")
    shape = variants[name]
    if not shape.parts:
        if body is not None:
            raise EncodeError(f"{name} has no fields, got {body!r}")
        return shape.cls()
    if _wraps(shape):
        return shape.cls(_read(shape.parts[0], body, revision, name))
    return _read(shape, body, revision, name)


# --------------------------------------------------------------------------------------------------- names and shapes


def _wraps(shape: Shape) -> bool:
    """Whether a variant wraps one struct or enum, and so has no field names in JSON."""
    return len(shape.parts) == 1 and shape.parts[0].op in ("struct", "enum")


def _inner(shape: Shape) -> Shape:
    return shape.parts[0] if _wraps(shape) else shape


@cache
def _by_name(family: str, revision: Revision) -> dict[str | None, Shape]:
    """The Shapes of a kind's variants by the crate's names; under None that of a kind without variants."""
    union = PAYLOADS[family][1]
    variants = variants_of(union)
    if not variants:
        return {None: struct_of(union)}
    # The crate's name is the class's without the enum's prefix and without Msg.
    return {
        cls.__name__.removeprefix(family).removesuffix("Msg"): struct_of(cls)
        for cls, since in variants
        if since is None or revision >= since
    }


@cache
def _by_class(revision: Revision) -> dict[type, tuple[str | None, Shape]]:
    return {shape.cls: (name, shape) for family in PAYLOADS for name, shape in _by_name(family, revision).items()}


def variant_names(kind: MsgKind | int | str) -> list[str | None]:
    """The crate's names of a kind's variants, at any revision; a kind without variants has but None."""
    family = family_name(kind)
    return list(_by_name(family, max(Revision))) if family in PAYLOADS else [None]


def member_name(member: IntEnum) -> str:
    """An enum's member by the crate's name."""
    return member.name.title().replace("_", "")


def _fields(shape: Shape, revision: Revision) -> list[tuple[str, Shape]]:
    return [
        (name, part)
        for name, part, since in zip(shape.names, shape.parts, shape.since, strict=True)
        if since is None or revision >= since
    ]


# ------------------------------------------------------------------------------------------------------------ writing


def _write(shape: Shape, value: Any, revision: Revision) -> Any:
    op = shape.op
    if op == "opt":
        return None if value is None else _write(shape.parts[0], value, revision)
    if op in ("f64", "f32"):
        return float(value) if math.isfinite(value) else None
    if op in _RANGES:
        return int(value)
    if op in ("bytes", "fixed"):
        return list(value)
    if op == "list":
        return [_write(shape.parts[0], item, revision) for item in value]
    if op == "tuple":
        return [_write(part, item, revision) for part, item in zip(shape.parts, value, strict=True)]
    if op == "map":
        return {key: _write(shape.parts[1], item, revision) for key, item in value.items()}
    if op == "enum":
        return member_name(value)
    if op == "struct":
        return {name: _write(part, getattr(value, name), revision) for name, part in _fields(shape, revision)}
    return value


# ------------------------------------------------------------------------------------------------------------ reading


def _read(shape: Shape, value: Any, revision: Revision, where: str) -> Any:
    op = shape.op
    if op == "opt":
        return None if value is None else _read(shape.parts[0], value, revision, where)
    if op == "struct":
        _expect(isinstance(value, dict), where, "an object", value)
        fields = {}
        for name, part in _fields(shape, revision):
            if name not in value and part.op != "opt":
                raise EncodeError(f"{_at(where, name)} is missing")
            fields[name] = _read(part, value.get(name), revision, _at(where, name))
        return shape.cls(**fields)
    if op in _RANGES:
        low, high = _RANGES[op]
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value < high
        _expect(good, where, f"an integer from {low} to {high - 1}", value)
        return value
    if op in ("f64", "f32"):
        _expect(isinstance(value, (int, float)) and not isinstance(value, bool), where, "a number", value)
        try:
            wide = float(value)
        except OverflowError:
            bits = int(value).bit_length()
            raise EncodeError(f"{where}: an integer of {bits} bits is too large for a float") from None
        return wide if op == "f64" else _narrow(wide)
    if op == "str":
        _expect(isinstance(value, str), where, "text", value)
        return value
    if op in ("bytes", "fixed"):
        size = f" of {shape.size}" if op == "fixed" else ""
        good = isinstance(value, list) and all(type(b) is int and 0 <= b < 256 for b in value)
        _expect(good and (not size or len(value) == shape.size), where, f"a list{size} of bytes", value)
        return bytes(value)
    if op == "list":
        _expect(isinstance(value, list), where, "a list", value)
        return [_read(shape.parts[0], item, revision, f"{where}[{i}]") for i, item in enumerate(value)]
    if op == "tuple":
        good = isinstance(value, list) and len(value) == len(shape.parts)
        _expect(good, where, f"a list of {len(shape.parts)}", value)
        return tuple(
            _read(p, v, revision, f"{where}[{i}]") for i, (p, v) in enumerate(zip(shape.parts, value, strict=True))
        )
    if op == "map":
        _expect(isinstance(value, dict), where, "an object", value)
        return {key: _read(shape.parts[1], item, revision, f"{where}[{key!r}]") for key, item in value.items()}
    members = {member_name(member): member for member in shape.cls}
    _expect(isinstance(value, str) and value in members, where, f"one of {list(members)}", value)
    return members[value]


def _narrow(value: float) -> float:
    """The nearest float32; too large a number becomes an infinity, as where the crate narrows one."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _only_item(value: Any) -> tuple[str, Any]:
    _expect(isinstance(value, dict) and len(value) == 1, "", "a variant's name, or an object with one", value)
    ((name, body),) = value.items()
    return name, body


def _expect(good: bool, where: str, expected: str, value: Any) -> None:
    if not good:
        try:
            shown = repr(value)
        except ValueError:  # an integer of more digits than Python prints
            shown = f"{type(value).__name__} too long to show"
        shown = shown if len(shown) < 60 else shown[:57] + "..."
        raise EncodeError(f"{where + ': ' if where else ''}expected {expected}, got {shown}")

"""The wire types that message annotations are made of, and their reading as a tree (docs/wire.md §2).

A message is a slotted dataclass whose annotations are these types: its field order is its wire order. ``shape_of``
turns an annotation into a ``Shape``, the one description that the compiled codec, the JSON form and the column
dtypes are all derived from.
"""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints
from typing import Optional as Opt

from .protocol import Revision

__all__ = ["Bytes32", "Opt", "Since", "f32", "f64", "i32", "u8", "u16", "u32", "u64"]


@dataclass(frozen=True)
class Scalar:
    """The wire type of a number, or of bytes of a fixed length."""

    op: str
    size: int = 0


@dataclass(frozen=True)
class Since:
    """Marks a field or a variant that older revisions than this do not have."""

    revision: str


u8 = Annotated[int, Scalar("u8")]
u16 = Annotated[int, Scalar("u16")]
u32 = Annotated[int, Scalar("u32")]
u64 = Annotated[int, Scalar("u64")]
i32 = Annotated[int, Scalar("i32")]
f32 = Annotated[float, Scalar("f32")]
f64 = Annotated[float, Scalar("f64")]
Bytes32 = Annotated[bytes, Scalar("fixed", 32)]

_PLAIN = {str: "str", bytes: "bytes"}


@dataclass(frozen=True)
class Shape:
    """A wire type as a tree.

    Attributes:
        op: u8, u16, u32, u64, i32, f32, f64, str, bytes, fixed, opt, list, tuple, map, enum or struct.
        parts: the types inside: of opt and list one, of map key and value, of tuple its items, of struct its fields.
        cls: the class of an enum or struct, else object.
        size: the length of ``fixed``, in bytes.
        names: the field names of a struct.
        since: per field of a struct the revision that brought it, None where 0.6 has it.
    """

    op: str
    parts: tuple[Shape, ...] = ()
    cls: Any = object
    size: int = 0
    names: tuple[str, ...] = ()
    since: tuple[Revision | None, ...] = ()


@cache
def struct_of(cls: type) -> Shape:
    """The Shape of a message class, its fields in wire order."""
    hints = get_type_hints(cls, include_extras=True)
    names = tuple(f.name for f in dataclasses.fields(cls))
    parts, since = zip(*(_field(hints[name]) for name in names), strict=True) if names else ((), ())
    return Shape("struct", tuple(parts), cls, names=names, since=tuple(since))


def shape_of(annotation: Any) -> Shape:
    """The Shape of one annotation.

    Raises:
        TypeError: the annotation is not a wire type.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for mark in args[1:]:
            if isinstance(mark, Scalar):
                return Shape(mark.op, size=mark.size)
        return shape_of(args[0])
    if origin in (Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        return Shape("opt", (shape_of(args[0]),))
    if origin is list:
        return Shape("list", (shape_of(args[0]),))
    if origin is tuple:
        return Shape("tuple", tuple(shape_of(a) for a in args))
    if origin is dict and args[0] is str:
        return Shape("map", (shape_of(args[0]), shape_of(args[1])))
    if annotation in _PLAIN:
        return Shape(_PLAIN[annotation])
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return Shape("enum", cls=annotation)
    if dataclasses.is_dataclass(annotation):
        return struct_of(cast(type, annotation))
    raise TypeError(f"{annotation!r} is not a wire type")


def variants_of(union: Any) -> list[tuple[type, Revision | None]]:
    """The classes of a union of messages in index order, each with the revision that brought it.

    A message that is a payload by itself, such as MetricsMsg, is not a union: its list is empty.
    """
    return [(get_args(v)[0], _since(v)) if get_origin(v) is Annotated else (v, None) for v in get_args(union)]


def _field(annotation: Any) -> tuple[Shape, Revision | None]:
    return shape_of(annotation), _since(annotation)


def _since(annotation: Any) -> Revision | None:
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((Revision(m.revision) for m in marks if isinstance(m, Since)), None)

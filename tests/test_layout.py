"""How annotations are read as wire types, and what "since" a revision does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import pytest

import flodl_fast as ff
from flodl_fast.layout import (
    Bytes32,
    Opt,
    Shape,
    Since,
    f32,
    f64,
    i32,
    shape_of,
    struct_of,
    u8,
    u16,
    u32,
    u64,
    variants_of,
)
from flodl_fast.protocol import Revision, supported_revision

GROWN = Path(__file__).with_name("grown.py")


class Colour(IntEnum):
    RED = 0
    BLUE = 1


@dataclass(slots=True)
class Inner:
    flag: u8


@dataclass(slots=True)
class Outer:
    inner: Inner
    late: Annotated[Opt[f64], Since("0.7")] = None
    later: Annotated[u64, Since("0.8")] = 0


@dataclass(slots=True)
class Empty:
    pass


@pytest.mark.parametrize(("annotation", "op", "parts"), [
    (u8, "u8", ()), (u16, "u16", ()), (u32, "u32", ()), (u64, "u64", ()), (i32, "i32", ()), (f32, "f32", ()),
    (f64, "f64", ()), (str, "str", ()), (bytes, "bytes", ()), (Bytes32, "fixed", ()),
    (Opt[f64], "opt", ("f64",)), (Optional[u8], "opt", ("u8",)), (Inner | None, "opt", ("struct",)),
    (list[u64], "list", ("u64",)), (list[list[str]], "list", ("list",)),
    (tuple[f64, u64], "tuple", ("f64", "u64")), (dict[str, f64], "map", ("str", "f64")),
    (Colour, "enum", ()), (Inner, "struct", ("u8",)), (Empty, "struct", ()),
    (Annotated[u16, "a note"], "u16", ()), (Annotated[list[u8], Since("0.7")], "list", ("u8",)),
])
def test_annotations_that_are_wire_types(annotation, op, parts):
    shape = shape_of(annotation)
    assert (shape.op, tuple(part.op for part in shape.parts)) == (op, parts)


def test_shapes_say_what_their_type_needs():
    assert shape_of(Bytes32).size == 32
    assert shape_of(Colour).cls is Colour
    assert shape_of(Inner) == struct_of(Inner)
    outer = struct_of(Outer)
    assert outer.cls is Outer
    assert outer.names == ("inner", "late", "later")
    assert outer.since == (None, Revision.V0_7, Revision.V0_8)
    assert outer.parts == (struct_of(Inner), Shape("opt", (shape_of(f64),)), shape_of(u64))
    assert struct_of(Empty).names == ()


@pytest.mark.parametrize("annotation", [
    int, float, bool, complex, object, list, dict, tuple, Any, None, "u64", 7, Annotated[int, "a note"],
    dict[int, f64], dict[u64, f64], list[int], Union[u64, str], Union[u64, str, None], set[u64], tuple[u64, ...],
    ff.ControlMsg,
])
def test_annotations_that_are_not(annotation):
    with pytest.raises(TypeError, match="is not a wire type"):
        shape_of(annotation)


def test_structs_that_are_not():
    @dataclass(slots=True)
    class Wrong:
        rank: u64
        phase: complex

    with pytest.raises(TypeError, match="complex"):
        struct_of(Wrong)
    with pytest.raises(TypeError, match="dataclass"):
        struct_of(int)


def test_variants_of_a_union():
    union = Union[Inner, Annotated[Outer, Since("0.8")]]
    assert variants_of(union) == [(Inner, None), (Outer, Revision.V0_8)]
    assert variants_of(ff.MetricsMsg) == []


def test_revisions_order_by_age():
    assert Revision.V0_6 < Revision.V0_7 < Revision.V0_8
    assert not Revision.V0_7 < Revision.V0_7
    assert Revision.V0_8 >= Revision.V0_8 > Revision.V0_7 >= Revision.V0_6 <= Revision.V0_6
    assert max(Revision) is Revision.V0_8
    with pytest.raises(TypeError, match="not supported between instances of 'Revision' and 'str'"):
        assert Revision.V0_6 < "0.7"


def test_supported_revisions():
    for revision in Revision:
        assert supported_revision(revision.value) is supported_revision(revision) is revision
    for wrong in ("0.5", "0.6.0", "", 0.6, None, []):
        with pytest.raises(ValueError, match=r"not supported; supported: '0\.6', '0\.7', '0\.8'"):
            supported_revision(wrong)


LATER = [
    # A field is on the wire from its revision on.
    ("old.encode_payload(Grown(1, [Part(2)])).hex()", "0f010102"),
    ("mid.encode_payload(Grown(1, [Part(2)])).hex()", "0f01010200" "0000"),
    ("new.encode_payload(Grown(1, [Part(2)])).hex()", "0f01010200" "000000"),
    ("mid.encode_payload(Grown(1, [], 0.5, [None])).hex()", "0f010001000000000000e03f0100"),
    ("new.encode_payload(Grown(1, named={'a': 2.0})).hex()", "0f0100000001" "0161" "0000000000000040"),
    ("old.decode_payload('Timing', bytes.fromhex('0f01020304'), trailing='error') == Grown(1, [Part(3), Part(4)])",
     "True"),
    ("mid.decode_payload('Timing', bytes.fromhex('0f01010201' '0000000000000040' '0000'), trailing='error').parts",
     "[Part(number=2, late=[2.0])]"),
    ("new.decode_payload('Timing', bytes.fromhex('0f0100000001' '0161' '0000000000000040'), trailing='error').named",
     "{'a': 2.0}"),
    # Absent at an older revision: empty or None, each its own object.
    ("old.decode_payload('Timing', bytes.fromhex('0f0100'))",
     "Grown(rank=1, parts=[], norm=None, losses=[], named={})"),
    ("mid.decode_payload('Timing', bytes.fromhex('0f01000000'))",
     "Grown(rank=1, parts=[], norm=None, losses=[], named={})"),
    ("old.decode_payload('Timing', b'\\x0f\\1\\0').named is old.decode_payload('Timing', b'\\x0f\\1\\0').named",
     "False"),
    # Leftovers of a younger peer, and what an older one lacks.
    ("old.decode_payload('Timing', bytes.fromhex('0f01000000'), trailing='error')", "TrailingDataError"),
    ("mid.decode_payload('Timing', bytes.fromhex('0f0100'))", "PayloadError: Grown.norm: the payload ends here"),
    # Set, but without a place.
    ("old.encode(Grown(1, norm=0.5))", "EncodeError: Grown.norm: "),
    ("old.encode(Grown(1, losses=[0.5]))", "EncodeError: Grown.losses: "),
    ("old.encode(Grown(1, [Part(1), Part(2, [0.5])]))", "EncodeError: Grown.parts[1].late: "),
    ("mid.encode(Grown(1, named={'a': 1.0}))", "EncodeError: Grown.named: "),
    ("len(old.encode(Grown(1, norm=None, losses=[], named={})))", "27"),
    # A variant has an index from its revision on.
    ("mid.encode_payload(New(3)).hex()", "1103"),
    ("mid.decode_payload('Timing', b'\\x11\\3')", "New(rank=3)"),
    ("old.encode(New(3))", "EncodeError: New "),
    ("old.encode_payload(New(3))", "EncodeError: New "),
    ("old.encode_many([ff.Heartbeat(1, 2), New(3)])", "EncodeError: message 1: New "),
    ("old.decode_payload('Timing', b'\\x11\\3')",
     "PayloadError: unknown variant 17 of Timing, this revision has 0 to 16"),
    # JSON has that revision's fields and variants.
    ("ff.to_json(Grown(1), revision='0.6')", "{'Grown': {'rank': 1, 'parts': []}}"),
    ("ff.to_json(Grown(1), revision='0.7')", "{'Grown': {'rank': 1, 'parts': [], 'norm': None, 'losses': []}}"),
    ("ff.from_json('Timing', {'Grown': {'rank': 1, 'parts': [{'number': 2}]}}, revision='0.6')",
     "Grown(rank=1, parts=[Part(number=2, late=[])], norm=None, losses=[], named={})"),
    ("ff.from_json('Timing', {'New': {'rank': 1}}, revision='0.7')", "New(rank=1)"),
    ("ff.from_json('Timing', {'New': {'rank': 1}}, revision='0.6')", "EncodeError: unknown variant 'New'"),
    ("ff.to_json(New(1), revision='0.6')", "TypeError: New "),
    # So have columns.
    ("' '.join(mid.timing_columns(mid.encode(Numbers(1)))['Numbers'].dtype[i].name for i in range(10))",
     "int64 uint64 float64 bool uint8 uint32 int32 float32 float32 bool"),
    ("mid.timing_columns(mid.encode(Numbers(1, 0.5, 255, 2**32 - 1, -(2**31), 0.25, 1.5)))['Numbers'].tolist()",
     "[(0, 1, 0.5, True, 255, 4294967295, -2147483648, 0.25, 1.5, True)]"),
    ("old.timing_columns(old.encode(Numbers(1, None, 2, 3, -4, 5.0)))['Numbers'].tolist()",
     "[(0, 1, 2, 3, -4, 5.0, nan, False)]"),
    ("old.timing_columns(old.encode(Numbers(1)))['Numbers'].dtype.names",
     "('index', 'rank', 'small', 'wide', 'signed', 'single', 'maybe', 'maybe_present')"),
    ("old.timing_columns(old.encode(Grown(1, [Part(2)])))['Grown'].dtype.names", "('index', 'rank', 'parts')"),
    ("old.timing_columns(old.encode(Grown(1, [Part(2)])))['Grown'].tolist()", "[(0, 1, [Part(number=2, late=[])])]"),
    ("mid.timing_columns(mid.encode(New(3)))['New'].tolist()", "[(0, 3)]"),
    # Each revision announces itself and refuses the others.
    ("new.encode(ff.Shutdown()).hex()[8:16]", "04000000"),
    ("new.decode(old.encode(ff.Shutdown()))",
     "VersionMismatchError: control frame version 2 (of 0.6 or 0.7), revision 0.8 has 4"),
]


def ask(questions, *options):
    """What tests/grown.py, a process of its own, makes of these expressions."""
    command = [sys.executable, GROWN, *options]
    return json.loads(subprocess.run(command, input=json.dumps(questions), text=True, stdout=-1, check=True).stdout)


@pytest.fixture(scope="module")
def later():
    return dict(zip((question for question, _ in LATER), ask([question for question, _ in LATER]), strict=True))


@pytest.mark.parametrize(("expression", "expected"), LATER)
def test_since(later, expression, expected):
    answer = later[expression]
    assert (answer[:len(expected)] if "Error" in expected else answer) == expected


@pytest.mark.parametrize(("name", "error"), [
    ("Loose", "TypeError: Loose.rank is not a slot"),
    ("Gapped", "TypeError: Gap must number its members from 0 in order"),
])
def test_classes_that_no_layout_can_be_made_of(name, error):
    assert ask(["ff.Codec(bytes(16))"], name) == [error]

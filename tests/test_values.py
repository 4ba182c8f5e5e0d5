"""What each field takes and what it becomes on the wire: docs/wire.md §2, and what is refused by name."""

from __future__ import annotations

import decimal
import fractions
import math
import struct

import numpy as np
import pytest
import reference as ref
from conftest import same
from support import CODEC, Scalar, oracle_form

import flodl_fast as ff

PLAN = ff.EpochPlan(1, 2, 300)

# Per wire type: a message with the value in it, its place in an error, and what stands before it on the wire.
U64 = (lambda value: ff.SetGlobalStep(value), r"SetGlobalStep\.global_step", "09")
U32 = (lambda value: ff.RelayRankExit(value), r"RelayRankExit\.rank", "02")
U16 = (lambda value: ff.DashboardRegister(1, value), r"DashboardRegister\.port", "0b01")
U8 = (lambda value: ff.ShutdownWithSave(value), r"ShutdownWithSave\.reason", "0e")
I32 = (lambda value: ff.JoinRankExited(0, value), r"JoinRankExited\.code", "0400")
F64 = (lambda value: ff.LrUpdate(1, value), r"LrUpdate\.lr", "0301")
OPT_F64 = (lambda value: ff.SyncAck(1, 2, None, None, value), r"SyncAck\.pre_norm", "0101020000")
F32 = (lambda value: ff.MetricsMsg(0, 0, resources=ff.ResourceSample(gpus=[ff.GpuSnapshot(0, "", value)])),
       r"MetricsMsg\.resources\.gpus\[0\]\.util_percent", "0000" + "00" * 8 + "00" + "00" * 8 + "00" + "00" * 24 + "00"
       + "01" + "00" * 7 + "01" + "0000")
TEXT = (lambda value: ff.JoinReject(value), r"JoinReject\.reason", "02")
BYTES = (lambda value: ff.RendezvousUid(value), r"RendezvousUid\.uid_bytes", "02")
DIGEST = (lambda value: ff.RendezvousHello(value, 0, ""), r"RendezvousHello\.dataset_sig", "00")
KEY = (lambda value: ff.MetricsMsg(0, 0, scalars={value: (1.0, 1)}), r"MetricsMsg\.scalars", None)
INTEGERS = {"u64": (U64, 0, 2**64), "u32": (U32, 0, 2**32), "u16": (U16, 0, 2**16), "u8": (U8, 0, 2**8),
            "i32": (I32, -(2**31), 2**31)}


def wire(of, value):
    """The wire bytes of a value, from where its type begins in the payload."""
    make, _, before = of
    payload = CODEC.encode_payload(make(value)).hex()
    assert payload.startswith(before)
    return payload[len(before):]


def refused(of, value, error):
    make, field, _ = of
    with pytest.raises(error, match=field) as caught:
        CODEC.encode_payload(make(value))
    assert caught.type is error
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------------- integers


@pytest.mark.parametrize(("of", "value", "expected"), [
    (U64, 0, "00"), (U64, 250, "fa"), (U64, 251, "fbfb00"), (U64, 65535, "fbffff"), (U64, 65536, "fc00000100"),
    (U64, 2**32 - 1, "fcffffffff"), (U64, 2**32, "fd0000000001000000"), (U64, 2**64 - 1, "fdffffffffffffffff"),
    (U32, 2**32 - 1, "fcffffffff"), (U16, 8080, "fb901f"), (U16, 65535, "fbffff"), (U8, 251, "fb"), (U8, 255, "ff"),
    (I32, 0, "00"), (I32, -1, "01"), (I32, 1, "02"), (I32, -9, "11"), (I32, 125, "fa"), (I32, -126, "fbfb00"),
    (I32, 137, "fb1201"), (I32, 2**31 - 1, "fcfeffffff"), (I32, -(2**31), "fcffffffff"),
])
def test_integers_on_the_wire(of, value, expected):
    message = of[0](value)
    assert wire(of, value) == expected
    kind, form = oracle_form(message)
    assert ref.encode_payload(kind, form).hex() == of[2] + expected
    decoded = CODEC.decode_payload(kind, bytes.fromhex(of[2] + expected))
    assert decoded == message


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_at_both_ends(name):
    of, low, end = INTEGERS[name]
    for value in (low, end - 1):
        assert wire(of, value)
    for value in (low - 1, end, -(2**63), -(2**64), 2**64, 2**128, -(2**128)):
        assert str(value) in refused(of, value, ff.EncodeError)
    assert f"from {low} to {end - 1}" in refused(of, end, ff.EncodeError)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_thousands_of_digits(name):
    for value in (10**5000, -(10**5000)):
        refused(INTEGERS[name][0], value, ff.EncodeError)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("kind", [
    np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.intc, np.longlong,
    np.ulonglong,
], ids=lambda kind: kind.__name__)
def test_integers_of_numpy(name, kind):
    of, low, end = INTEGERS[name]
    info = np.iinfo(kind)
    for value in (0, 7, 100, int(info.min), int(info.max), -1):
        if not info.min <= value <= info.max:
            continue
        for given in (kind(value), np.array(value, kind)):
            if low <= value < end:
                assert wire(of, given) == wire(of, value)
            else:
                assert str(value) in refused(of, given, ff.EncodeError)


@pytest.mark.parametrize("dtype", [">i2", "<i2", ">i4", "<i4", ">u8", "<u8"])
def test_integers_of_either_byte_order(dtype):
    for value in (0, 200):
        for given in (np.array(value, dtype), np.array(value, dtype)[()]):
            for of, _, _ in INTEGERS.values():
                assert wire(of, given) == wire(of, value)


class Odd(int):
    """An int that is more than an int."""


@pytest.mark.parametrize("value", [
    Odd(100), ff.MsgKind(7), Scalar(100, "torch.int64"), Scalar(100, "torch.uint8"), Scalar(100, "int32"),
    Scalar(100, "uint8", None),
])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_other_kinds(name, value):
    assert wire(INTEGERS[name][0], value) == wire(INTEGERS[name][0], int(value.__index__()))


NOT_INTEGERS = [
    True, False, None, 1.0, 1.5, math.nan, "1", "", b"1", [1], (1,), {}, 1j, object(), int, decimal.Decimal(1),
    fractions.Fraction(1), np.bool_(True), np.float64(1), np.float16(1), np.complex64(1), np.str_("1"), np.bytes_(b"1"),
    np.datetime64(1, "s"), np.timedelta64(1, "s"), np.timedelta64(1, "ns"), np.void(b"\1"),
    np.array(True), np.array(1.0), np.array(1j), np.array("1"), np.array(1, "m8[ns]"), np.array(1, object),
    np.array([1]),
    np.array([], int), np.array([[1]]), np.zeros((), [("point", "f8")]), np.zeros((), [("uint", "u8")]),
    Scalar(1, "torch.bool"), Scalar(1, "torch.float32"), Scalar(1, "torch.complex64"), Scalar(1, "torch.int64", (1,)),
]


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=lambda value: f"{type(value).__name__} {value!r:.30}")
def test_what_is_no_integer(value):
    for of, _, _ in INTEGERS.values():
        assert "expected an integer, got " + type(value).__name__ in refused(of, value, TypeError)


# ------------------------------------------------------------------------------------------------------------- floats


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf])
def test_floats_on_the_wire(value):
    raw = struct.pack("<d", value).hex()
    assert wire(F64, value) == raw
    assert wire(OPT_F64, value) == "01" + raw
    assert same(CODEC.decode_payload("Timing", bytes.fromhex(F64[2] + raw)).lr, value)


@pytest.mark.parametrize("bits", [
    0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000001, 0x7FF0000000000001, 0xFFF4000000001234,
])
def test_nans_keep_their_bits(bits):
    value, = struct.unpack("<d", struct.pack("<Q", bits))
    raw = bits.to_bytes(8, "little").hex()
    assert wire(F64, value) == raw
    assert CODEC.encode_payload(CODEC.decode_payload("Timing", bytes.fromhex(F64[2] + raw))).hex() == F64[2] + raw


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFA01234, 0x7FFFFFFF, 1, 0x80000000])
def test_single_floats_keep_their_bits(bits):
    message = CODEC.decode_payload("Metrics", bytes.fromhex(F32[2] + "01") + bits.to_bytes(4, "little") + bytes(2))
    assert CODEC.encode_payload(message).hex() == F32[2] + "01" + bits.to_bytes(4, "little").hex() + "0000"


@pytest.mark.parametrize("value", [
    0, 3, -3, 2**53 + 1, 2**64, -(2**70), Odd(5), np.float16(0.1), np.float32(0.1), np.float64(0.1), np.longdouble(0.5),
    np.int8(-3), np.uint64(2**64 - 1), np.array(0.1), np.array(0.1, ">f4"), np.array(3, ">i2"), np.array(0.25, "<f2"),
    math.inf, np.float32(-math.inf), np.longdouble(math.inf), np.array(math.inf), Scalar(math.inf, "torch.float32"),
    Scalar(0.5, "torch.bfloat16"), Scalar(0.5, "torch.float64"), Scalar(5, "torch.int32"), Scalar(0.5, "float32", None),
], ids=repr)
def test_what_counts_as_a_float(value):
    plain = float(value)
    assert wire(F64, value) == struct.pack("<d", plain).hex()
    assert wire(OPT_F64, value) == "01" + struct.pack("<d", plain).hex()
    assert wire(F32, value) == "01" + struct.pack("<f", plain).hex() + "0000"


@pytest.mark.parametrize("value", [
    True, False, "1.0", "", b"1", [1.0], (1.0,), {}, 1j, object(), float, decimal.Decimal(1), fractions.Fraction(1),
    np.bool_(True), np.complex128(1), np.str_("1"), np.datetime64(1, "s"), np.timedelta64(1, "s"),
    np.timedelta64(1, "ns"),
    np.array(True), np.array(1j), np.array("1"), np.array(1.0, object), np.array([1.0]), np.array([[1.0]]),
    np.zeros((), [("point", "f8")]), np.zeros((), [("float", "f8")]), Scalar(1.0, "torch.bool"),
    Scalar(1.0, "torch.complex64"), Scalar(1.0, "torch.float32", (1,)),
], ids=lambda value: f"{type(value).__name__} {value!r:.30}")
def test_what_is_no_float(value):
    for of in (F64, OPT_F64, F32):
        assert "expected a float, got " + type(value).__name__ in refused(of, value, TypeError)


def test_an_absent_float_is_none_only_where_it_may_be():
    assert wire(OPT_F64, None) == "00"
    refused(F64, None, TypeError)


@pytest.mark.parametrize("value", [10**309, -(10**309), pytest.param(10**5000, id="huge"), 2**1024])
def test_integers_too_large_for_a_float(value):
    for of in (F64, F32):
        assert "too large for a float" in refused(of, value, ff.EncodeError)


@pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(float).max, reason="long double is double here")
def test_long_doubles_too_large_for_a_float():
    refused(F64, np.longdouble("1e400"), ff.EncodeError)


@pytest.mark.parametrize("value", [1e39, -1e39, 3.4028235677973366e38, 10**39, np.float64(1e300)])
def test_floats_too_large_for_a_single(value):
    assert "32-bit" in refused(F32, value, ff.EncodeError)


def test_singles_round_to_the_nearest():
    for value, expected in (
        (0.1, "cdcccc3d"), (3.4028235677973362e38, "ffff7f7f"), (1e-46, "00000000"), (math.inf, "0000807f"),
    ):
        assert wire(F32, value) == "01" + expected + "0000"


# ------------------------------------------------------------------------------------------------------ text and bytes


@pytest.mark.parametrize("value", [
    "", "loss", "\0", "a\0b", "é", "日本語", "🦀", "\U0010ffff", "\ufeff", "x" * 250, "y" * 251, "é" * 40000,
    np.str_("text"),
], ids=lambda value: f"{value!a:.20}")
def test_text_on_the_wire(value):
    raw = value.encode()
    assert wire(TEXT, value) == (ref.put_varint(len(raw)) + raw).hex()
    assert CODEC.decode_payload("Join", CODEC.encode_payload(ff.JoinReject(value))).reason == value
    metrics = ff.MetricsMsg(0, 0, scalars={value: (1.0, 2)})
    assert CODEC.decode_payload("Metrics", CODEC.encode_payload(metrics)) == metrics


@pytest.mark.parametrize("value", ["\ud800", "a\udfffb", "ok \ud83e", "\udd80\ud83e"])
def test_lone_surrogates(value):
    assert ascii(value) in refused(TEXT, value, ff.EncodeError)
    assert ascii(value) in refused(KEY, value, ff.EncodeError)


@pytest.mark.parametrize("value", [None, 5, b"text", True, ["text"], 1.5, np.bytes_(b"x"), object()], ids=repr)
def test_what_is_no_text(value):
    assert "expected text, got " + type(value).__name__ in refused(TEXT, value, TypeError)
    if not isinstance(value, list):
        assert "expected text, got " + type(value).__name__ in refused(KEY, value, TypeError)


def test_a_huge_number_is_no_text_either():
    refused(TEXT, 10**5000, TypeError)


@pytest.mark.parametrize(("raw", "at"), [
    ("02c328", 2), ("03eda080", 2), ("02c080", 2), ("0461ff6162", 3), ("04f09fa6", 1), ("01ff", 2), ("0361c3", 1),
])
def test_bytes_that_are_no_text(raw, at):
    for before in ("02", "03"):  # JoinReject.reason, JoinWorldFormed.envelope_hex
        with pytest.raises(ff.PayloadError, match=rf"payload byte {at}\b"):
            CODEC.decode_payload("Join", bytes.fromhex(before + raw))


@pytest.mark.parametrize("value", [
    b"", b"\1\xff\xfb", bytearray(b"abc"), memoryview(b"abcdef")[1:4], memoryview(b"abcdef")[::2],
    memoryview(bytearray(b"x")),
    memoryview(np.arange(3, dtype="<u2")),
], ids=lambda value: type(value).__name__)
def test_bytes_on_the_wire(value):
    raw = bytes(value)
    assert wire(BYTES, value) == (ref.put_varint(len(raw)) + raw).hex()
    decoded = CODEC.decode_payload("Rendezvous", CODEC.encode_payload(ff.RendezvousUid(value)))
    assert type(decoded.uid_bytes) is bytes
    assert decoded.uid_bytes == raw


@pytest.mark.parametrize("value", [None, "text", 5, [1, 2], (1,), np.zeros(4, np.uint8), object()], ids=repr)
def test_what_is_no_bytes(value):
    for of in (BYTES, DIGEST):
        assert "expected bytes, got " + type(value).__name__ in refused(of, value, TypeError)


def test_bytes_of_a_fixed_length():
    assert wire(DIGEST, bytes(range(32))) == bytes(range(32)).hex() + "0000"
    for size in (0, 31, 33):
        assert f"expected 32 bytes, got {size}" in refused(DIGEST, bytes(size), ff.EncodeError)


# --------------------------------------------------------------------------------------------------------- containers


def test_lists_tuples_and_maps():
    advisory = ff.StageAdvisory([4, 4], [(0, [(0, 128)])])
    assert CODEC.encode_payload(advisory).hex() == "130204040100010080"
    alike = ff.StageAdvisory((4, 4), ([0, ((0, 128),)],))
    assert CODEC.encode_payload(alike) == CODEC.encode_payload(advisory)
    assert CODEC.decode_payload("Control", CODEC.encode_payload(alike)) == advisory
    ordered = {"z": (1.0, 1), "a": (2.0, 2), "m": (3.0, 3)}
    decoded = CODEC.decode_payload("Metrics", CODEC.encode_payload(ff.MetricsMsg(0, 0, scalars=ordered)))
    assert list(decoded.scalars.items()) == list(ordered.items())
    assert type(decoded.scalars) is dict
    assert type(decoded.scalars["z"]) is tuple


@pytest.mark.parametrize(("message", "text"), [
    (ff.StageAdvisory(None), "StageAdvisory.counts: expected a list, got NoneType"),
    (ff.StageAdvisory({1: 2}), "StageAdvisory.counts: expected a list, got dict"),
    (ff.StageAdvisory(np.array([1])), "StageAdvisory.counts: expected a list, got ndarray"),
    (ff.StageAdvisory(iter([1])), "StageAdvisory.counts: expected a list, got list_iterator"),
    (ff.StageAdvisory([1, "2"]), "StageAdvisory.counts[1]: expected an integer, got str '2'"),
    (ff.StageAdvisory([], [5]), "StageAdvisory.segments[0]: expected a tuple of 2, got int 5"),
    (ff.StageAdvisory([], [(1, [(2, 3), (4, None)])]),
     "StageAdvisory.segments[0][1][1][1]: expected an integer, got NoneType"),
    (ff.MetricsMsg(0, 0, scalars=[]), "MetricsMsg.scalars: expected a dict, got list"),
    (ff.MetricsMsg(0, 0, scalars={"a": 5}), "MetricsMsg.scalars['a']: expected a tuple of 2, got int 5"),
    (ff.MetricsMsg(0, 0, scalars={"a": (1.0, 2.0)}), "MetricsMsg.scalars['a'][1]: expected an integer, got float 2.0"),
    (ff.MetricsMsg(0, 0, resources={}), "MetricsMsg.resources: expected ResourceSample, got dict"),
    (ff.EpochAggregated(ff.EpochMetrics(1, per_rank=[{}, {"loss": None}])),
     "EpochAggregated.metrics.per_rank[1]['loss']: expected a float, got NoneType"),
    (ff.EpochAggregated(None), "EpochAggregated.metrics: expected EpochMetrics, got NoneType"),
    (ff.StartEpoch((1, 2, 3)), "StartEpoch.plan: expected EpochPlan, got tuple"),
    (ff.Update(1, ff.EpochMetrics(1)), "Update.next_plan: expected EpochPlan, got EpochMetrics"),
    (ff.Intent(1, 0), "Intent.kind: expected a member of IntentKind, got int 0"),
    (ff.Intent(1, ff.RendezvousRole.WAIT), "Intent.kind: expected a member of IntentKind, got RendezvousRole"),
    (ff.RendezvousRoleMsg("Wait"), "RendezvousRoleMsg.role: expected a member of RendezvousRole, got str 'Wait'"),
])
def test_wrong_types_are_named_with_their_place(message, text):
    with pytest.raises(TypeError) as caught:
        CODEC.encode_payload(message)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(("message", "text"), [
    (ff.StageAdvisory([], [(1,)]), "StageAdvisory.segments[0]: expected 2 items, got 1"),
    (ff.StageAdvisory([], [(1, [(2, 3, 4)])]), "StageAdvisory.segments[0][1][0]: expected 2 items, got 3"),
    (ff.MetricsMsg(0, 0, scalars={"a": ()}), "MetricsMsg.scalars['a']: expected 2 items, got 0"),
    (ff.StartEpoch(ff.EpochPlan(1, 2, -3)),
     f"StartEpoch.plan.partition_size: expected an integer from 0 to {2**64 - 1}, got -3"),
    (ff.Update(1, ff.EpochPlan(2**64, 2, 3)), "Update.next_plan.epoch: expected an integer"),
    (ff.JoinAccept([0, 2**32], None, 1),
     "JoinAccept.ranks[1]: expected an integer from 0 to 4294967295, got 4294967296"),
])
def test_values_out_of_range_are_named_with_their_place(message, text):
    with pytest.raises(ff.EncodeError) as caught:
        CODEC.encode_payload(message)
    assert str(caught.value).startswith(text)


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(("kind", "payload", "message"), [
    ("Control", "fb1200", ff.CoordHeartbeat()), ("Control", "09fb0500", ff.SetGlobalStep(5)),
    ("Control", "09fc05000000", ff.SetGlobalStep(5)), ("Control", "09fd0500000000000000", ff.SetGlobalStep(5)),
    ("Timing", "0b01fb0500", ff.DashboardRegister(1, 5)), ("Relay", "02fc05000000", ff.RelayRankExit(5)),
    ("Join", "0400fc01000000", ff.JoinRankExited(0, -1)), ("Join", "02fb010061", ff.JoinReject("a")),
    ("Timing", "0400fb0100", ff.Intent(0, ff.IntentKind.CHECKPOINT_NOW)),
])
def test_wide_integers_are_read(kind, payload, message):
    assert CODEC.decode_payload(kind, bytes.fromhex(payload), trailing="error") == message


@pytest.mark.parametrize(("kind", "payload", "text"), [
    ("Control", "", "the payload ends here: 1 bytes more expected, 0 left (payload byte 0)"),
    ("Control", "14", "unknown variant 20 of Control, this revision has 0 to 19 (payload byte 0)"),
    ("Timing", "0f00", "unknown variant 15 of Timing, this revision has 0 to 14 (payload byte 0)"),
    ("Relay", "04", "unknown variant 4 of Relay, this revision has 0 to 3 (payload byte 0)"),
    ("Control", "fd0000000000000000", "integer lead byte 0xfd is not one of a u32 (payload byte 0)"),
    ("Control", "ff", "integer lead byte 0xff is not one of a u32 (payload byte 0)"),
    ("Control", "09ff", "SetGlobalStep.global_step: integer lead byte 0xff is not one of a u64 (payload byte 1)"),
    ("Control", "09fe" + "00" * 16, "SetGlobalStep.global_step: integer lead byte 0xfe is not one of a u64"),
    ("Control", "09fb05", "SetGlobalStep.global_step: the payload ends here: 3 bytes more expected, 2 left"),
    ("Timing", "0b01fc05000000", "DashboardRegister.port: integer lead byte 0xfc is not one of a u16 (payload byte 2)"),
    ("Relay", "02fd0500000000000000",
     "RelayRankExit.rank: integer lead byte 0xfd is not one of a u32 (payload byte 1)"),
    ("Join", "0400fd0100000000000000",
     "JoinRankExited.code: integer lead byte 0xfd is not one of a u32 (payload byte 2)"),
    ("Control", "010702", "Update.next_plan: option tag must be 0 or 1, got 2 (payload byte 2)"),
    ("Control", "0107", "Update.next_plan: the payload ends here"),
    ("Control", "010701010203"[:-2], "Update.next_plan.partition_size: the payload ends here"),
    ("Control", "07fdffffffffffffffff00", "NewNcclSession.uid_bytes: 18446744073709551615 items of at least 1 bytes "
     "announced, 1 bytes left (payload byte 1)"),
    ("Control", "13fd000000000000008000", "StageAdvisory.counts: 9223372036854775808 items of at least 1 bytes"),
    ("Control", "1300fb0200" "00", "StageAdvisory.segments: 2 items of at least 2 bytes announced, 1 bytes left"),
    ("Control", "130001" "0002" "0000",
     "StageAdvisory.segments[0][1]: 2 items of at least 2 bytes announced, 2 bytes left"),
    ("Control", "130001" "0001" "00ff", "StageAdvisory.segments[0][1][0][1]: integer lead byte 0xff"),
    ("Control", "0f00" "0101", "EpochAggregated.metrics.scalars: 1 items of at least 9 bytes announced, 1 bytes left"),
    ("Timing", "0402", "Intent.kind: the payload ends here"),
    ("Timing", "040002", "Intent.kind: unknown variant 2 of IntentKind, this revision has 0 to 1 (payload byte 2)"),
    ("Timing", "0c00" "fdffffffffffffff7f", "DashboardSetSvg.svg: 9223372036854775807 items of at least 1 bytes"),
    ("Timing", "0301" + "00" * 7, "LrUpdate.lr: the payload ends here: 8 bytes more expected, 7 left (payload byte 2)"),
    ("Rendezvous", "00" + "00" * 31,
     "RendezvousHello.dataset_sig: the payload ends here: 32 bytes more expected, 31 left"),
    ("Metrics", "00" * 44 + "01" "0161" + "00" * 8, "MetricsMsg.scalars['a'][1]: the payload ends here: 1 bytes more"),
])
def test_what_is_no_payload(kind, payload, text):
    with pytest.raises(ff.PayloadError) as caught:
        CODEC.decode_payload(kind, bytes.fromhex(payload))
    assert str(caught.value).startswith(text)


def test_faults_inside_a_map_name_its_key():
    payload = CODEC.encode_payload(ff.EpochAggregated(ff.EpochMetrics(1, {}, [{}, {"loss": 1.0, "acc": 2.0}])))
    at = payload.index(b"acc") + 3
    with pytest.raises(ff.PayloadError, match=rf"metrics\.per_rank\[1\]\['acc'\]: the payload ends here.*byte {at}"):
        CODEC.decode_payload("Control", payload[:at + 5])


def test_the_last_of_two_equal_keys_wins():
    payload = bytes.fromhex("0f" "00" "02" "0161" + "00" * 8 + "0161" + "000000000000f03f") + bytes(24)
    message = CODEC.decode_payload("Control", payload)
    assert message.metrics.scalars == {"a": 1.0}
    assert CODEC.encode_payload(message)[:3] == bytes.fromhex("0f0001")


def test_keys_that_look_alike_stay_apart():
    """Read keys are kept for the next message: by their bytes, not by their hash."""
    keys = [f"key {i}" for i in range(3000)] + ["é" * n for n in range(1, 20)] + ["x" * n for n in range(60)]
    for _ in range(2):
        for key in keys:
            message = ff.MetricsMsg(0, 0, scalars={key: (1.0, 1)})
            assert CODEC.decode_payload("Metrics", CODEC.encode_payload(message)) == message

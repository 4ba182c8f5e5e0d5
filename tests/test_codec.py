"""Codec: control frames, payloads, mux records, handshakes and salts, against the golden vectors and the oracle."""

from __future__ import annotations

import array
import ctypes
import gc
import hashlib
import hmac
import mmap
import random
import struct
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference as ref
from conftest import SALT, golden, golden_params, same
from generate import damage
from support import (
    CODEC,
    KIND_OF,
    MESSAGE_FILES,
    NUMBER_OF,
    codec_at,
    drawn,
    one_of_each,
    oracle_form,
    signed_frame,
    signed_record,
)

import flodl_fast as ff

# The oracle's word for a refusal, and the error that it must be.
ERRORS = {
    "truncated": ff.TruncatedError, "magic": ff.BadMagicError, "version": ff.VersionMismatchError,
    "kind": ff.UnknownKindError, "limit": ff.LimitError, "mac": ff.AuthenticationError, "payload": ff.PayloadError,
}
HEARTBEAT = ff.Heartbeat(3, 1000)
FRAME = CODEC.encode(HEARTBEAT)


def refusal(call, *args, **options):
    """The class of the error of ours, or TypeError, that a call raises; None where it raises none."""
    try:
        call(*args, **options)
    except (ff.FlodlError, TypeError) as error:
        return type(error)
    return None


def oracle_refusal(call, *args):
    """The class of error that the oracle asks for, None where it refuses nothing."""
    try:
        call(*args)
    except ref.WireError as error:
        return ERRORS[error.what]
    return None


def codec_of(case):
    return ff.Codec(case.get("salt", SALT), case["revision"])


# ------------------------------------------------------------------------------------------------------------ vectors


@pytest.mark.parametrize("case", golden_params(*MESSAGE_FILES))
def test_message_vectors(case):
    codec, frame, payload = codec_of(case), bytes.fromhex(case["frame"]), bytes.fromhex(case["payload"])
    message = codec.decode(frame, trailing="error")
    assert same(ff.to_json(message, revision=codec.revision), case["msg"])
    assert oracle_form(message, case["revision"])[0] == case["kind"]
    assert same(ref.to_json(oracle_form(message, case["revision"])[1]), case["msg"])
    assert codec.encode(message) == frame
    assert codec.encode_payload(message) == payload
    assert codec.encode(codec.decode_payload(case["kind"], payload, trailing="error")) == frame
    assert codec.mac(frame[16:]) == frame[8:16]
    if ref.one_byte_form(case["msg"]):
        assert codec.encode(ff.from_json(case["kind"], case["msg"], revision=codec.revision)) == frame


@pytest.mark.parametrize("case", golden_params("mutated"))
def test_mutated_vectors(case):
    codec, frame = codec_of(case), bytes.fromhex(case["frame"])
    if case["outcome"] == "message":
        message = codec.decode(frame)
        assert oracle_form(message, case["revision"])[0] == case["kind"]
        assert same(ff.to_json(message, revision=codec.revision), case["msg"])
        return
    with pytest.raises(ff.DecodeError) as caught:
        codec.decode(frame)
    assert (caught.type is ff.TruncatedError and len(frame) < 24) == (case["outcome"] == "eof")
    assert caught.type is oracle_refusal(ref.decode_frame, bytes.fromhex(case["salt"]), frame, case["revision"])


def wire_handshake(case, codec):
    rank, world = case["rank"], case["world"]
    sig = bytes.fromhex(case["model_sig"]) if case["revision"] == "0.8" else None
    hello, ack = bytes.fromhex(case["control_rank"]), bytes.fromhex(case["control_ack"])
    assert (codec.control_hello(rank, world, sig), codec.control_ack()) == (hello, ack)
    assert codec.data_ack() == bytes.fromhex(case["data_ack"])
    assert codec.check_control_hello(hello, world) == (rank, sig)
    codec.check_control_ack(ack)
    codec.check_data_ack(codec.data_ack())


def wire_mux(case, codec):
    raw = bytes.fromhex(case["bytes"])
    relay = ff.from_json("Relay", case["msg"], revision=codec.revision) if "msg" in case else None
    payload = bytes.fromhex(case["payload"]) if relay is None else relay
    kind = {"Data": 1, "Control": 2, "HostFrame": 3, "Broadcast": 4}[case["record"]]
    record = ff.MuxRecord(ff.MuxKind(kind), case.get("rank", 0), payload)
    assert codec.encode_mux(record) == raw
    assert codec.decode_mux(raw, trailing="error") == record
    assert codec.decode_mux(raw + b"rest") == record


def wire_hmac(case, codec):
    assert codec.mac(bytes.fromhex(case["bytes"])).hex() == case["tag"]


def wire_salt(case, codec):
    if "error" in case:
        with pytest.raises(ValueError, match="salt"):
            ff.Codec(case["hex"])
    else:
        assert ff.Codec(case["hex"]).mac(b"x") == ff.Codec(bytes.fromhex(case["salt"])).mac(b"x")


def wire_mass(case, codec):
    mass = ff.gamma_mass(case["n"], case["gamma"])
    assert struct.pack(">d", mass).hex() == case["gamma_mass_bits"]
    assert ff.mover_mass(case["n"]) == case["mover_mass"]
    assert ff.is_realized(case["n"]) is case["realized"]


def wire_frame_ceiling(case, codec):
    assert ff.frame_ceiling(case["model_bytes"]) == case["ceiling"]


@pytest.mark.parametrize("case", golden_params("wire"))
def test_wire_vectors(case):
    globals()[f"wire_{case['op']}"](case, codec_of(case))


# ------------------------------------------------------------------------------------------------------------ buffers


class Bytes(bytes):
    pass


def mapped(data):
    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return pages


def inside(data):
    return memoryview(b"\xff\xff\xff" + data + b"\xff\xff\xff")[3:-3]


BUFFERS = {
    "bytes": bytes, "bytes subclass": Bytes, "bytearray": bytearray, "memoryview": memoryview,
    "read-only view": lambda data: memoryview(bytearray(data)).toreadonly(), "slice at an odd offset": inside,
    "array": lambda data: array.array("B", data), "signed array": lambda data: array.array("b", data),
    "ndarray": lambda data: np.frombuffer(data, np.uint8), "void": lambda data: np.frombuffer(data, "V1"),
    "ctypes": lambda data: (ctypes.c_char * len(data)).from_buffer_copy(data), "mmap": mapped,
}


@pytest.mark.parametrize("form", BUFFERS.values(), ids=BUFFERS)
def test_every_kind_of_buffer_can_be_read(form):
    for name in MESSAGE_FILES:
        for case in golden(name)[::7]:
            codec, frame = codec_of(case), bytes.fromhex(case["frame"])
            message = codec.decode(frame)
            assert oracle_form(codec.decode(form(frame), trailing="error")) == oracle_form(message)
            assert oracle_form(codec.decode_payload(case["kind"], form(frame[24:]))) == oracle_form(message)
            assert [oracle_form(m) for m in codec.decode_many(form(frame))[0]] == [oracle_form(message)]
            assert codec.mac(form(frame[16:])) == frame[8:16]
    record = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, FRAME))
    assert CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, form(FRAME))) == record
    assert CODEC.decode_mux(form(record)) == ff.MuxRecord(ff.MuxKind.DATA, 3, FRAME)
    assert CODEC.check_control_hello(form(CODEC.control_hello(1, 3)), 3) == (1, None)
    assert CODEC.check_data_hello(form(CODEC.data_hello(1, 3)), 3) == 1
    CODEC.check_control_ack(form(CODEC.control_ack()))
    CODEC.check_data_ack(form(CODEC.data_ack()))


@pytest.mark.parametrize("value", [None, "text", 5, [1, 2], object()])
def test_what_is_no_buffer(value):
    for call in (
        CODEC.decode, CODEC.decode_many, CODEC.timing_columns, CODEC.decode_mux, CODEC.mac,
        lambda data: CODEC.decode_payload("Timing", data), lambda data: CODEC.encode_into(HEARTBEAT, data),
    ):
        with pytest.raises(TypeError, match="bytes-like"):
            call(value)


def test_a_buffer_with_gaps_is_refused():
    gaps = np.repeat(np.frombuffer(FRAME, np.uint8), 2)[::2]
    for call in (CODEC.decode, CODEC.decode_many, CODEC.timing_columns, CODEC.decode_mux, CODEC.mac):
        with pytest.raises((ValueError, BufferError), match="contiguous"):
            call(gaps)
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        CODEC.encode_into(HEARTBEAT, np.zeros(200, np.uint8)[::2])


def test_decoding_leaves_no_hold_on_the_buffer():
    sent = [HEARTBEAT, ff.NewNcclIdGenerated(1, b"uid"), ff.DashboardSetMetadata(1, "x")]
    buffer = bytearray(CODEC.encode_many(sent))
    messages, _ = CODEC.decode_many(buffer)
    columns = CODEC.timing_columns(buffer)
    buffer.clear()  # a BufferError where something still exports it
    assert messages == sent
    assert columns["NewNcclIdGenerated"]["uid_bytes"].tolist() == [b"uid"]
    for wrong in (FRAME[:-1], b"\0" * 24, FRAME[:8] + bytes(8) + FRAME[16:]):
        buffer[:] = wrong
        for call in (CODEC.decode, CODEC.timing_columns):
            with pytest.raises(ff.DecodeError):
                call(buffer)
        buffer.clear()


# -------------------------------------------------------------------------------------------------------- one message


def test_messages_against_the_oracle(revision):
    codec = codec_at(revision)
    for message in drawn(11, 2000, revision, entries=4):
        kind, value = oracle_form(message, revision)
        frame = ref.encode_frame(SALT, kind, value, revision)
        assert codec.encode(message) == frame
        decoded = codec.decode(frame, trailing="error")
        assert type(decoded) is type(message)
        assert same(oracle_form(decoded, revision)[1], value)
        assert codec.encode(decoded) == frame


def test_the_payload_alone(revision):
    codec = codec_at(revision)
    for message in one_of_each(12, revision, finite=True):
        kind = KIND_OF[type(message)]
        payload = codec.encode_payload(message)
        assert payload == ref.encode_payload(*oracle_form(message, revision), revision)
        number = NUMBER_OF.get(kind)
        for name in (kind,) if kind == "Relay" else (kind, number, ff.MsgKind(number), np.int64(number)):
            assert codec.decode_payload(name, payload, trailing="error") == message
        assert codec.decode_payload(kind, payload + b"\0\0") == message
        with pytest.raises(ff.TrailingDataError, match=rf"2 extra bytes of {len(payload) + 2}"):
            codec.decode_payload(kind, payload + b"\0\0", trailing="error")


@pytest.mark.parametrize("kind", [0, 8, -1, 2**70, 1.0, True, None, "timing", "", "Nothing", ff.RoundKind.MODEL])
def test_a_payload_of_an_unknown_kind(kind):
    with pytest.raises(ff.UnknownKindError, match="unknown kind"):
        CODEC.decode_payload(kind, b"")


@pytest.mark.parametrize("kind", [4, 5])
def test_reserved_kinds_carry_bytes(kind):
    frame = signed_frame(kind, b"any\0thing")
    message = CODEC.decode(frame, trailing="error")
    assert message == ff.Reserved(ff.MsgKind(kind), b"any\0thing")
    assert type(message.kind) is ff.MsgKind
    assert CODEC.encode(message) == CODEC.encode(ff.Reserved(kind, bytearray(b"any\0thing"))) == frame
    assert CODEC.encode_payload(message) == b"any\0thing"
    assert CODEC.decode_payload(kind, b"") == ff.Reserved(ff.MsgKind(kind), b"")
    assert CODEC.decode_payload(ff.MsgKind(kind), b"x") == ff.Reserved(ff.MsgKind(kind), b"x")


@pytest.mark.parametrize(("kind", "error"), [
    *((kind, ff.EncodeError) for kind in (-1, 0, 1, 3, 6, 8, 2**40)),
    *((kind, TypeError) for kind in ("Heartbeat", None, 4.0)),
])
def test_reserved_messages_of_other_kinds(kind, error):
    for call in (CODEC.encode, lambda message: CODEC.encode_many([message])):
        with pytest.raises(error):
            call(ff.Reserved(kind, b""))


@pytest.mark.parametrize("payload", [None, "text", 5, [1]])
def test_reserved_messages_without_bytes(payload):
    for call in (CODEC.encode, lambda message: CODEC.encode_many([message]), CODEC.encode_payload):
        with pytest.raises(TypeError):
            call(ff.Reserved(4, payload))


@pytest.mark.parametrize("value", [
    None, 5, "Shutdown", b"", ff.Heartbeat, {"rank": 1}, ff.EpochPlan(1, 2, 3), object(),
])
def test_what_is_no_message(value):
    for call in (
        CODEC.encode, CODEC.encode_payload, lambda value: CODEC.encode_into(value, bytearray(99)),
        lambda value: CODEC.encode_many([value]),
    ):
        with pytest.raises(TypeError, match=r"is not a message of revision 0\.6"):
            call(value)


def test_relay_messages_have_no_frame_of_their_own():
    for call in (CODEC.encode, lambda message: CODEC.encode_many([message])):
        with pytest.raises(TypeError, match=r"RelayHelloAck travels in a mux record"):
            call(ff.RelayHelloAck())


def test_order_of_checks():
    """Each header is wrong in all that is checked later too."""
    bad = bytearray(signed_frame(2, b"\5"))
    bad[8] ^= 1
    for at, value, error in (
        (None, None, ff.AuthenticationError), (20, 1 << 25, ff.LimitError), (16, 8, ff.UnknownKindError),
        (4, 3, ff.VersionMismatchError), (0, 1, ff.BadMagicError),
    ):
        if at is not None:
            bad[at:at + 4] = struct.pack("<I", value)
        assert refusal(CODEC.decode, bad, trailing="error") is error
        assert refusal(CODEC.decode, bad[:23], trailing="error") is ff.TruncatedError
    assert refusal(CODEC.decode, signed_frame(2, b"\5") + b"x", trailing="error") is ff.TrailingDataError
    assert refusal(CODEC.decode, signed_frame(2, b"\5") + b"x") is ff.PayloadError


def test_every_cut_and_every_flipped_byte_is_refused():
    for message in one_of_each(13):
        if KIND_OF[type(message)] == "Relay":
            continue
        frame = CODEC.encode(message)
        if len(frame) > 300:
            continue
        for at in range(len(frame)):
            assert refusal(CODEC.decode, frame[:at]) is ff.TruncatedError
            for bit in (0, 7):
                flipped = bytearray(frame)
                flipped[at] ^= 1 << bit
                assert refusal(CODEC.decode, flipped) not in (None, ff.PayloadError)


def test_damaged_frames_are_refused_as_the_oracle_does(revision):
    rng, codec = random.Random(14), codec_at(revision)
    met = set()
    for message in drawn(14, 3000, revision):
        payload = damage(rng, codec.encode_payload(message))
        frame = signed_frame(NUMBER_OF[KIND_OF[type(message)]], payload, revision)
        if rng.random() < 0.3:
            frame = damage(rng, frame)
        expected = oracle_refusal(ref.decode_frame, SALT, frame, revision)
        assert refusal(codec.decode, frame) is expected
        met.add(expected)
        if expected is None:
            kind, value, left = ref.decode_frame(SALT, frame, revision)
            assert same(oracle_form(codec.decode(frame), revision), (kind, value))
            used = ref.decode_payload(kind, frame[24:len(frame) - left], revision)[1]
            strict = refusal(codec.decode, frame, trailing="error")
            assert (strict is ff.TrailingDataError) == (left > 0 or used < len(frame) - left - 24)
    assert met == {None, *ERRORS.values()}


def test_trailing_is_checked_everywhere():
    record = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.BROADCAST, 0, b""))
    for call in (
        lambda how: CODEC.decode(FRAME, trailing=how), lambda how: CODEC.decode_many(FRAME, trailing=how),
        lambda how: CODEC.decode_payload("Timing", FRAME[24:], trailing=how),
        lambda how: CODEC.timing_columns(FRAME, trailing=how), lambda how: CODEC.decode_mux(record, trailing=how),
    ):
        for wrong in ("warn", "", None, True, b"error"):
            with pytest.raises(ValueError, match='"ignore" or "error"'):
                call(wrong)
        call("".join(["ign", "ore"]))


# -------------------------------------------------------------------------------------------------------- encode_into


def test_encode_into_writes_there_and_nowhere_else():
    for message in drawn(15, 200):
        frame = CODEC.encode(message)
        for before, after in ((0, 0), (1, 0), (0, 3), (7, 100)):
            buffer = bytearray(b"\xa5" * (before + len(frame) + after))
            assert CODEC.encode_into(message, buffer, before) == len(frame)
            assert buffer == b"\xa5" * before + frame + b"\xa5" * after


@pytest.mark.parametrize("buffer", [
    memoryview(bytearray(64)), array.array("B", bytes(64)), np.zeros(64, np.uint8), np.zeros(8, np.float64),
    (ctypes.c_ubyte * 64)(), mmap.mmap(-1, 64),
], ids=lambda buffer: type(buffer).__name__)
def test_encode_into_any_writable_buffer(buffer):
    assert CODEC.encode_into(HEARTBEAT, buffer, offset=3) == len(FRAME)
    assert memoryview(buffer).tobytes() == bytes(3) + FRAME + bytes(61 - len(FRAME))


def test_encode_into_writes_all_or_nothing():
    buffer = bytearray(len(FRAME) + 4)
    for offset in (5, len(buffer), len(buffer) + 1, 2**62, -1, -len(buffer), -(2**63)):
        with pytest.raises(ff.EncodeError, match=rf"{len(FRAME)} bytes at offset {offset}, the buffer has 33"):
            CODEC.encode_into(HEARTBEAT, buffer, offset)
    with pytest.raises(ff.EncodeError, match="the buffer has 0"):
        CODEC.encode_into(HEARTBEAT, bytearray())
    for wrong in (ff.Heartbeat(1, -1), ff.NewNcclIdGenerated(1, b"x" * (1 << 24))):
        with pytest.raises(ff.EncodeError):
            CODEC.encode_into(wrong, buffer)
    with pytest.raises(TypeError, match=r"Heartbeat\.step_count"):
        CODEC.encode_into(ff.Heartbeat(1, "2"), buffer)
    assert buffer == bytes(len(buffer))
    buffer.clear()


@pytest.mark.parametrize("buffer", [bytes(64), memoryview(bytes(64)), np.frombuffer(bytes(64), np.uint8)])
def test_encode_into_a_read_only_buffer(buffer):
    with pytest.raises(TypeError, match="read-only"):
        CODEC.encode_into(HEARTBEAT, buffer)


# ------------------------------------------------------------------------------------------------------------- limits


def test_payload_limit():
    codec = ff.Codec(SALT, max_payload=10)
    small = ff.DashboardSetMetadata(1, "1234567")
    assert codec.decode(codec.encode(small)) == small
    big = ff.DashboardSetMetadata(1, "12345678")
    for call in (codec.encode, lambda m: codec.encode_many([m]), lambda m: codec.encode_into(m, bytearray(99))):
        with pytest.raises(ff.EncodeError, match=r"payload of 11 bytes is above the limit of 10 \(max_payload\)"):
            call(big)
    frame = CODEC.encode(big)
    for data in (frame, frame[:24]):
        for call in (codec.decode, codec.decode_many, codec.timing_columns, codec.measure_frame):
            with pytest.raises(ff.LimitError, match=r"11 bytes is above the limit of 10 \(max_payload\)"):
                call(data)


def test_record_limit():
    codec = ff.Codec(SALT, frame_ceiling=10)
    record = ff.MuxRecord(ff.MuxKind.BROADCAST, 0, bytes(10))
    assert codec.decode_mux(codec.encode_mux(record)) == record
    big = ff.MuxRecord(ff.MuxKind.BROADCAST, 0, bytes(11))
    with pytest.raises(ff.EncodeError, match=r"11 bytes is above the limit of 10 \(frame_ceiling\)"):
        codec.encode_mux(big)
    raw = CODEC.encode_mux(big)
    for call, data in ((codec.decode_mux, raw), (codec.decode_mux, raw[:25]), (codec.measure_record, raw[:25])):
        with pytest.raises(ff.LimitError, match=r"11 bytes is above the limit of 10 \(frame_ceiling\)"):
            call(data)
    with pytest.raises(ff.LimitError, match=rf"{len(FRAME)} bytes is above the limit of 10 \(frame_ceiling\)"):
        codec.decode_many(CODEC.encode_many([HEARTBEAT], prefixed=True), prefixed=True)


def test_defaults_and_settings_can_be_read():
    assert (CODEC.max_payload, CODEC.max_tensors, CODEC.frame_ceiling) == (16 << 20, 65536, 1 << 30)
    assert CODEC.revision is ff.Revision.V0_6
    codec = ff.Codec(SALT, ff.Revision.V0_6, max_payload=1, max_tensors=2, frame_ceiling=3)
    assert (codec.max_payload, codec.max_tensors, codec.frame_ceiling) == (1, 2, 3)
    with pytest.raises(AttributeError):
        codec.max_payload = 5


@pytest.mark.parametrize("name", ["max_payload", "max_tensors", "frame_ceiling"])
def test_limits_that_cannot_be(name):
    for wrong in (0, -1, 2**63, 2**70):
        with pytest.raises(ValueError, match=name):
            ff.Codec(SALT, **{name: wrong})
    for wrong in ("1", 1.5, None):
        with pytest.raises(TypeError):
            ff.Codec(SALT, **{name: wrong})


@pytest.mark.parametrize("wrong", ["0.5", "0.6.0", "0.9", "", 0.6, None])
def test_revisions_that_are_not_spoken(wrong):
    with pytest.raises(ValueError, match=r"not supported; supported: '0\.6', '0\.7', '0\.8'"):
        ff.Codec(SALT, wrong)


def test_a_revision_given_as_a_number_is_asked_for_as_a_string():
    with pytest.raises(ValueError, match=r"0\.8 \(a float, not a string\) is not supported"):
        ff.Codec(SALT, 0.8)


def test_measures():
    assert CODEC.measure_frame(FRAME) == len(FRAME)
    assert CODEC.measure_frame(FRAME[:24]) == len(FRAME)
    assert CODEC.measure_frame(FRAME[:23]) is None
    assert CODEC.measure_frame(b"xx" + FRAME, 2) == len(FRAME)
    record = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 1, FRAME))
    assert CODEC.measure_record(record[:25]) == len(record)
    assert CODEC.measure_record(record[:24]) is None
    assert CODEC.measure_record(b"xx" + record, 2) == len(record)
    for call in (CODEC.measure_frame, CODEC.measure_record):
        assert call(b"") is None
        with pytest.raises(ff.BadMagicError):
            call(bytes(25))


def test_measures_before_the_buffer():
    for call, data in ((CODEC.measure_frame, FRAME), (CODEC.measure_record, signed_record(1, b""))):
        for offset in (-1, -len(data)):
            with pytest.raises(ValueError, match="offset"):
                call(memoryview(bytes(len(data)) + data)[len(data):], offset)


# -------------------------------------------------------------------------------------------------------- mux records


def test_mux_records_against_the_oracle(revision):
    rng, codec = random.Random(16), codec_at(revision)
    for message in drawn(16, 100, revision, kinds=("Relay",)):
        raw = ref.encode_mux(SALT, {"record": "Control", "msg": oracle_form(message, revision)[1]}, revision)
        record = ff.MuxRecord(ff.MuxKind.CONTROL, 0, message)
        assert codec.encode_mux(record) == raw
        assert codec.decode_mux(raw, trailing="error") == record
        raw = signed_record(2, damage(rng, raw[25:]))
        expected = oracle_refusal(ref.decode_mux, SALT, raw, ref.FRAME_CEILING, revision)
        assert refusal(codec.decode_mux, raw) is expected
        if expected is None:
            found = oracle_form(codec.decode_mux(raw).payload, revision)[1]
            assert same(found, ref.decode_mux(SALT, raw, revision=revision)[0]["msg"])


def test_data_records_against_the_oracle():
    rng = random.Random(116)
    for rank in (0, 1, 250, 2**32 - 1):
        payload = rng.randbytes(rank % 1000)
        raw = ref.encode_mux(SALT, {"record": "Data", "rank": rank, "payload": payload.hex()})
        assert CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, rank, payload)) == raw
        assert CODEC.decode_mux(raw) == ff.MuxRecord(ff.MuxKind.DATA, rank, payload)


def test_mux_order_of_checks_and_cuts():
    raw = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, b"hi"))
    for at in range(len(raw)):
        assert refusal(CODEC.decode_mux, raw[:at]) is ff.TruncatedError
        flipped = raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1:]
        expected = (
            ff.BadMagicError if at < 4 else ff.VersionMismatchError if at < 8 else
            (ff.LimitError if at == 16 else ff.TruncatedError) if 13 <= at < 17 else ff.AuthenticationError
        )
        assert refusal(CODEC.decode_mux, flipped) is expected
    for kind in (0, 5, 255):
        assert refusal(CODEC.decode_mux, signed_record(kind, b"")) is ff.UnknownKindError
    assert refusal(CODEC.decode_mux, signed_record(5, b"") + b"x", trailing="error") is ff.UnknownKindError
    assert refusal(CODEC.decode_mux, raw + b"x", trailing="error") is ff.TrailingDataError
    assert refusal(CODEC.decode_mux, signed_record(2, b"\1x"), trailing="error") is ff.TrailingDataError
    assert CODEC.decode_mux(signed_record(2, b"\1x")).payload == ff.RelayHelloAck()
    assert refusal(CODEC.decode_mux, signed_record(2, b"\4")) is ff.PayloadError
    assert CODEC.decode_mux(signed_record(3, b"x", rank=9)) == ff.MuxRecord(ff.MuxKind.HOST_FRAME, 9, b"x")


def test_mux_record_from_plain_numbers():
    record = ff.MuxRecord(ff.MuxKind.DATA, 3, b"hi")
    assert CODEC.encode_mux(ff.MuxRecord(1, np.uint8(3), b"hi")) == CODEC.encode_mux(record)
    assert ff.MuxRecord(ff.MuxKind.BROADCAST) == ff.MuxRecord(ff.MuxKind.BROADCAST, 0, b"")


@pytest.mark.parametrize(("record", "error"), [
    *((ff.MuxRecord(ff.MuxKind.DATA, rank, b""), ff.EncodeError) for rank in (-1, 2**32, 10**5000)),
    *((ff.MuxRecord(kind, 1, b""), ff.EncodeError) for kind in (ff.MuxKind.HOST_FRAME, ff.MuxKind.BROADCAST)),
    (ff.MuxRecord(ff.MuxKind.CONTROL, 1, ff.RelayHelloAck()), ff.EncodeError),
    (ff.MuxRecord(ff.MuxKind.CONTROL, 0, ff.RelayRankExit(-1)), ff.EncodeError),
    *((ff.MuxRecord(kind, 0, b""), ff.EncodeError) for kind in (0, 5, -1)),
    *((ff.MuxRecord(ff.MuxKind.DATA, rank, b""), TypeError) for rank in ("1", 1.5, True, None)),
    *((ff.MuxRecord(ff.MuxKind.DATA, 0, payload), TypeError) for payload in (None, "text", 5, ff.RelayHelloAck())),
    *((ff.MuxRecord(ff.MuxKind.CONTROL, 0, payload), TypeError) for payload in (b"", None, HEARTBEAT)),
])
def test_mux_records_that_cannot_be(record, error):
    with pytest.raises(error):
        CODEC.encode_mux(record)


# --------------------------------------------------------------------------------------------------------- handshakes


def sig_of(revision):
    """A model signature, where the revision has one."""
    return bytes(range(100, 132)) if revision == "0.8" else None


def test_handshakes_against_the_oracle(revision):
    rng, sig = random.Random(17), sig_of(revision)
    for _ in range(50):
        salt, rank, world = rng.randbytes(16), rng.getrandbits(32), rng.getrandbits(32)
        codec, hello = ff.Codec(salt, revision), ref.control_hello(salt, rank, world, sig or b"", revision)
        assert codec.control_hello(rank, world, sig) == hello
        assert codec.control_ack() == ref.control_ack(salt, revision)
        assert codec.data_hello(rank, world) == ref.data_hello(rank, world, revision)
        assert codec.data_ack() == ref.data_ack(revision)
        assert codec.check_control_hello(hello, world) == (rank, sig)
        assert codec.check_data_hello(ref.data_hello(rank, world, revision), world) == rank
        assert codec.check_control_ack(ref.control_ack(salt, revision)) is None
        assert codec.check_data_ack(ref.data_ack(revision)) is None


def greetings(revision):
    """A greeting, its check, and whether a MAC covers it."""
    codec = codec_at(revision)
    return {
        "control hello": (codec.control_hello(1, 3, sig_of(revision)), lambda d: codec.check_control_hello(d, 3), True),
        "control ack": (codec.control_ack(), codec.check_control_ack, True),
        "data hello": (codec.data_hello(1, 3), lambda data: codec.check_data_hello(data, 3), False),
        "data ack": (codec.data_ack(), codec.check_data_ack, False),
    }


@pytest.mark.parametrize("name", greetings("0.6"))
def test_greetings_that_do_not_fit(name, revision):
    good, check, signed = greetings(revision)[name]
    for size in range(len(good)):
        with pytest.raises(ff.TruncatedError, match=rf"{name} has {len(good)} bytes, got {size}"):
            check(good[:size])
    with pytest.raises(ff.TrailingDataError, match=rf"1 extra bytes after a {name}"):
        check(good + b"x")
    for at in range(len(good)):
        flipped = good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1:]
        if at < 4:
            expected = ff.BadMagicError
        elif at < 8:
            expected = ff.VersionMismatchError
        elif 12 <= at < 16 and "hello" in name:
            expected = ff.HandshakeError
        elif signed:
            expected = ff.AuthenticationError
        else:
            assert check(flipped) == 1 ^ 0x10 << 8 * (at - 8)  # the rank, which a data hello does not authenticate
            continue
        with pytest.raises(expected):
            check(flipped)
    for other, (data, _, _) in greetings(revision).items():
        if other != name:
            with pytest.raises(ff.BadMagicError, match=name):
                check(data)


@pytest.mark.parametrize("name", greetings("0.6"))
def test_greetings_of_another_version(name):
    """The version is looked at before the size, which differs with it."""
    for old in ("0.6", "0.7"):
        for ours, theirs in ((old, "0.8"), ("0.8", old)):
            told = rf"{name} version \d \(of 0\.\d( or 0\.7)?\), revision {ours} has \d"
            with pytest.raises(ff.VersionMismatchError, match=told):
                greetings(ours)[name][1](greetings(theirs)[name][0])
    assert greetings("0.6")[name][0] == greetings("0.7")[name][0]


def test_greetings_under_another_salt():
    other = ff.Codec(bytes(16))
    with pytest.raises(ff.AuthenticationError):
        CODEC.check_control_hello(other.control_hello(1, 3), 3)
    with pytest.raises(ff.AuthenticationError):
        CODEC.check_control_ack(other.control_ack())


def test_a_hello_of_another_world_names_both():
    for hello, check in (
        (CODEC.control_hello(1, 3), CODEC.check_control_hello), (CODEC.data_hello(1, 3), CODEC.check_data_hello),
    ):
        with pytest.raises(ff.HandshakeError, match="rank 1 belongs to a world of 3 ranks, this one has 4"):
            check(hello, 4)


@pytest.mark.parametrize("wrong", [-1, 2**32])
@pytest.mark.parametrize("hello", [CODEC.control_hello, CODEC.data_hello], ids=["control", "data"])
def test_greetings_of_numbers_out_of_range(hello, wrong):
    for numbers in ((wrong, 3), (1, wrong)):
        with pytest.raises(ff.EncodeError, match=str(wrong)):
            hello(*numbers)


@pytest.mark.parametrize("wrong", ["1", 1.5, None, True, b"1"])
@pytest.mark.parametrize("hello", [CODEC.control_hello, CODEC.data_hello], ids=["control", "data"])
def test_greetings_of_what_is_no_integer(hello, wrong):
    for numbers in ((wrong, 3), (1, wrong)):
        with pytest.raises(TypeError):
            hello(*numbers)


def test_a_hello_has_a_model_sig_from_0_8_on():
    for revision in ("0.6", "0.7"):
        codec = codec_at(revision)
        assert codec.control_hello(1, 3, None) == codec.control_hello(np.int64(1), np.uint8(3))
        with pytest.raises(ff.EncodeError, match=rf"revision {revision} has no model_sig, one of 32 bytes"):
            codec.control_hello(1, 3, bytes(32))
    for sig, text in ((None, "none"), (b"", "one of 0 bytes"), (bytes(31), "one of 31"), (bytes(33), "one of 33")):
        with pytest.raises(ff.EncodeError, match=rf"0\.8 has a model_sig of 32 bytes, {text}"):
            codec_at("0.8").control_hello(1, 3, sig)


# ---------------------------------------------------------------------------------------------------------- revisions


LOSSES = ff.EpochAggregated(ff.EpochMetrics(3, {"loss": 0.5}, per_rank_loss=[0.5, None], per_rank_samples=[64, 0]))
SAMPLE = ff.TimingResourceSample(1, ff.ResourceSample(cpu_percent=50.0))


def test_what_a_revision_lacks_is_never_sent_to_it():
    for message, text in (
        (LOSSES, r"EpochAggregated\.metrics\.per_rank_loss: is set, but the codec's revision does not have it"),
        (SAMPLE, r"TimingResourceSample needs revision 0\.7, the codec's is 0\.6"),
    ):
        for call in (CODEC.encode, CODEC.encode_payload, lambda m: CODEC.encode_many([m])):
            with pytest.raises(ff.EncodeError, match=text):
                call(message)
        for revision in ("0.7", "0.8"):
            codec = codec_at(revision)
            assert codec.decode(codec.encode(message), trailing="error") == message
    hello = ff.JoinHello("h", b"\0", [], "", bytes(32), "run", (2, 21, 5), bytes(32))
    for revision in ("0.6", "0.7"):
        with pytest.raises(ff.EncodeError, match=r"JoinHello\.run_id"):
            codec_at(revision).encode(hello)
        with pytest.raises(ff.EncodeError, match=r"RelayHello\.model_sigs"):
            codec_at(revision).encode_payload(ff.RelayHello("h", [0], [bytes(32)]))
    assert codec_at("0.8").decode(codec_at("0.8").encode(hello)) == hello


def test_the_two_revisions_that_announce_the_same():
    """Each reads what the other sent as the crate of its revision does; a lenient codec as what it is."""
    bare = ff.EpochAggregated(ff.EpochMetrics(3, {"loss": 0.5}))
    old, new = CODEC, codec_at("0.7")
    assert old.decode(new.encode(LOSSES)) == bare
    assert refusal(old.decode, new.encode(LOSSES), trailing="error") is ff.TrailingDataError
    assert refusal(new.decode, old.encode(bare)) is ff.PayloadError
    assert refusal(old.decode, new.encode(SAMPLE)) is ff.PayloadError
    for revision in ("0.6", "0.7"):
        codec = ff.Codec(SALT, revision, lenient=True)
        assert codec.lenient
        for sent, message in ((old, bare), (new, LOSSES), (new, SAMPLE), (new, bare), (old, ff.Shutdown())):
            frame = sent.encode(message)
            for trailing in ("ignore", "error"):
                assert codec.decode(frame, trailing=trailing) == message
                assert codec.decode_many(frame * 3, trailing=trailing)[0] == [message] * 3
                assert codec.decode_payload(frame[16], frame[24:], trailing=trailing) == message
        # What neither layout fits is as it is without leniency.
        for payload in (b"\2x", b"\x20"):
            for trailing in ("ignore", "error"):
                strict = outcome_of(codec_at(revision), payload, trailing)
                assert outcome_of(codec, payload, trailing) == strict


def outcome_of(codec, payload, trailing):
    try:
        return codec.decode_payload("Control", payload, trailing=trailing)
    except ff.DecodeError as error:
        return type(error), str(error)


def test_leniency_changes_nothing_at_0_8():
    codec = ff.Codec(SALT, "0.8", lenient=True)
    payload = CODEC.encode_payload(ff.EpochAggregated(ff.EpochMetrics(3)))
    assert refusal(codec.decode_payload, "Control", payload) is ff.PayloadError


# ---------------------------------------------------------------------------------------------------- model signatures


class Sized:
    """An array of which only these two are looked at."""

    def __init__(self, dtype, *shape):
        self.dtype, self.shape = dtype, shape


def test_model_sigs_against_the_oracle():
    parameters = {"conv.weight": np.zeros((8, 1, 3, 3), np.float32), "scale": np.float64(1.0), "é": np.zeros(0, "f2")}
    buffers = [("mean", Sized("torch.bfloat16", 4)), ("seen", np.int64(3)), ("ids", np.zeros((2, 0), np.int32))]
    expected = ref.model_sig(
        [("conv.weight", "float32", [8, 1, 3, 3]), ("scale", "float64", []), ("é", "float16", [0])],
        [("mean", "bfloat16", [4]), ("seen", "int64", []), ("ids", "int32", [2, 0])],
    )
    assert ff.model_sig(parameters, buffers) == ff.model_sig(parameters.items(), dict(buffers)) == expected
    assert ff.model_sig({}) == hashlib.sha256().digest()
    for other in (dict(reversed(parameters.items())), {**parameters, "scale": np.zeros(1)}, {"w": np.zeros(1)}):
        assert ff.model_sig(other, buffers) != expected


@pytest.mark.parametrize(("named", "text"), [
    ({"w": np.zeros(1, "u1")}, "w: flodl has no code for dtype uint8"), ({"w": [1.0]}, "w: a list has no dtype"),
    ([(0, np.zeros(1))], "name of a parameter or buffer, got int"),
    ([np.zeros(2)], "names with their arrays, a mapping or pairs, got one ndarray"), (["w"], "pairs, got one str"),
])
def test_model_sigs_that_cannot_be(named, text):
    with pytest.raises(TypeError, match=text):
        ff.model_sig(named)
    with pytest.raises(TypeError, match=text):
        ff.model_sig({}, named)


# -------------------------------------------------------------------------------------------------------------- salts


@pytest.mark.parametrize("salt", [
    SALT, bytearray(SALT), memoryview(SALT), SALT.hex(), SALT.hex().upper(), f" \t{SALT.hex()}\r\n",
])
def test_salts(salt):
    assert ff.Codec(salt).mac(b"data") == hmac.digest(SALT, b"data", "sha256")[:8]


@pytest.mark.parametrize("salt", [
    b"", SALT[:15], SALT + b"\0", SALT.hex().encode(), "", "00" * 15, "00" * 17, "0" * 31, "g" * 32, "0x" + "00" * 15,
    "00 " * 10 + "00", "\u0661" * 32, "+1" * 16, "00" * 8 + " " + "00" * 8, "\0" * 32,
])
def test_salts_that_cannot_be(salt):
    with pytest.raises(ValueError, match="salt"):
        ff.Codec(salt)


@pytest.mark.parametrize("salt", [None, 5, 16, [0] * 16, np.zeros(16, np.uint8), object()])
def test_salts_of_the_wrong_type(salt):
    with pytest.raises(TypeError, match="salt is 16 bytes or 32 hex digits"):
        ff.Codec(salt)


def test_macs_of_every_length():
    data = random.Random(18).randbytes(1000)
    for size in [*range(300), 511, 512, 513, 1000]:
        assert CODEC.mac(data[:size]) == hmac.digest(SALT, data[:size], "sha256")[:8]
    big = bytes(3 << 20)
    assert CODEC.mac(big) == hmac.digest(SALT, big, "sha256")[:8]


# ------------------------------------------------------------------------------------------------- threads and memory


def test_threads_share_a_codec():
    messages = drawn(19, 300, entries=4)
    frames = [CODEC.encode(message) for message in messages]
    whole = b"".join(frames)
    columns = {name: rows.tolist() for name, rows in CODEC.timing_columns(whole).items()}
    big = ff.NewNcclIdGenerated(1, bytes(100_000))  # large enough for the GIL to be released

    def work(seed):
        rng = random.Random(seed)
        for _ in range(300):
            i = rng.randrange(len(messages))
            assert CODEC.encode(messages[i]) == frames[i]
            assert CODEC.encode(CODEC.decode(frames[i])) == frames[i]
        for _ in range(5):
            assert CODEC.decode(CODEC.encode(big)) == big
            assert CODEC.encode_many(CODEC.decode_many(whole)[0]) == whole
            assert same(list(CODEC.timing_columns(whole)), list(columns))
            codec = ff.Codec(rng.randbytes(16))
            assert codec.decode(codec.encode(HEARTBEAT)) == HEARTBEAT
        return seed

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))


def growth(work):
    """The bytes that Python's allocators hold more after 500 calls than after the first."""
    tracemalloc.start()
    try:
        work()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(500):
            work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_failing_decodes_hold_nothing():
    text = CODEC.encode_payload(ff.DashboardSetSvg(1, "svg", "a label", "\x7f"))
    frames = [
        bytes.fromhex(frame) for frame in (
            "c4170df102000000dac3cf6c2ec962330100000003000000010702",
            "c4170df1020000002255609c07ddfe85010000000100000014",
            "c4170df10200000041324a348620468e02000000050000000d0002c328",
        )
    ]
    metrics = CODEC.encode_payload(ff.EpochAggregated(ff.EpochMetrics(1, {"a": 1.0}, [{"b": 2.0}, {"c": 3.0}] * 3)))
    frames += [signed_frame(1, metrics[:-cut]) for cut in (1, 5, 20, 60, 100)]
    frames += [signed_frame(2, text[:-1] + b"\xff"), FRAME[:-1], FRAME[:20], FRAME[:8] + bytes(8) + FRAME[16:], b""]
    first = [HEARTBEAT, ff.DashboardSetMetadata(1, "a text"), ff.MetricsMsg(1, 2, scalars={"a": (1.0, 2)})]
    good = CODEC.encode_many(first)

    def work():
        for frame in frames:
            for call in (CODEC.decode, CODEC.timing_columns, lambda data: CODEC.decode_many(good + data)):
                refusal(call, frame)

    assert growth(work) < 10_000


def test_failing_encodes_hold_nothing():
    big, name = b"x" * 2000, "a name of its own"
    wrong = [
        ff.MetricsMsg(1, 2, scalars={name: (1.0, -1)}), ff.MetricsMsg(1, 2, scalars={name: (1.0, 1), 5: (1.0, 1)}),
        ff.StageAdvisory([1, 2, None]), ff.StageAdvisory([*range(3000), 2**64]), ff.NewNcclSession(big, 1, -1),
        ff.DashboardSetSvg(1, "\ud800"), ff.Heartbeat(1, "x"),
    ]
    counts = [sys.getrefcount(value) for value in (big, name, None)]

    def work():
        for message in wrong:
            for call in (CODEC.encode, CODEC.encode_payload, lambda m: CODEC.encode_many([HEARTBEAT, m])):
                assert refusal(call, message) in (ff.EncodeError, TypeError)

    assert growth(work) < 10_000
    assert [sys.getrefcount(value) for value in (big, name)] == counts[:2]
    assert abs(sys.getrefcount(None) - counts[2]) < 1000


def test_reference_counts_are_flat():
    values = [b"uid", "a text of its own", 10**15, 0.125, ff.IntentKind.EVAL_NOW]
    messages = [
        ff.NewNcclIdGenerated(values[2], values[0]), ff.DashboardSetSvg(1, values[1], values[1], None),
        ff.EvalResult(1, 2, 3, values[3], values[3], values[1]), ff.Intent(1, values[4]),
        ff.MetricsMsg(1, 2, scalars={values[1]: (values[3], values[2])}),
    ]
    counts = [sys.getrefcount(value) for value in values]
    for _ in range(1000):
        frames = CODEC.encode_many(messages)
        decoded, _ = CODEC.decode_many(frames)
        columns = CODEC.timing_columns(frames)
    assert decoded == messages
    assert len(columns) == 4
    del decoded, columns
    assert [sys.getrefcount(value) for value in values] == counts

"""Messages against the published crates, live, and against the oracle: equal values, equal bytes, equal refusals."""

from __future__ import annotations

import random

import pytest
import reference as ref
from conftest import SALT, same
from generate import damage, messages, salts
from peer import ABORTED
from support import KIND_OF, NUMBER_OF, codec_at, oracle_form, signed_frame

import flodl_fast as ff

MESSAGES = 1500  # each way and revision; every variant of every kind in turn
TAKEN_DOWN = ABORTED, {"error": "panic"}


@pytest.fixture
def peer(peer, revision):
    """The reference peer of the revision at hand."""
    return lambda mode: peer(mode, revision)


@pytest.fixture
def codec(revision):
    return codec_at(revision)


def drawn(seed, revision, **options):
    """Salt, Codec, kind and value in the oracle's form of every message."""
    values = messages(seed, MESSAGES, revision=revision, **options)
    for salt, (kind, value) in zip(salts(seed, MESSAGES), values, strict=True):
        yield salt, ff.Codec(salt, revision), kind, value


def refusal(call, *args):
    """The class of the DecodeError that a call raises, None where it raises none."""
    try:
        call(*args)
    except ff.DecodeError as error:
        return type(error)
    return None


def ask_decode(peer, frame, salt=SALT):
    return peer("decode").ask({"salt": salt.hex(), "frame": frame.hex()})


def same_outcome(codec, crate, frame):
    """Whether we make of a frame under SALT what the crate made of it.

    Two exceptions are known: an end inside the header is a clean end to the crate and a truncation to us, and a huge
    string length takes the crate down, where we refuse it.
    """
    if "eof" in crate:
        return len(frame) < 24 and refusal(codec.decode, frame) is ff.TruncatedError
    if crate in TAKEN_DOWN:
        return refusal(codec.decode, frame) is ff.PayloadError
    if "error" in crate:
        return refusal(codec.decode, frame) is not None
    message = codec.decode(frame)
    if "payload" in crate:
        return message == ff.Reserved(message.kind, bytes.fromhex(crate["payload"]))
    return KIND_OF[type(message)] == crate["kind"] and same(ff.to_json(message, revision=codec.revision), crate["msg"])


def test_ours_to_crate_to_ours(peer, revision):
    for salt, codec, kind, value in drawn(101, revision, finite=True, entries=3):
        message = ff.from_json(kind, value, revision=revision)
        frame = codec.encode(message)
        read = ask_decode(peer, frame + b"rest", salt)
        assert (read["kind"], read["left"]) == (kind, 4)
        assert same(read["msg"], ff.to_json(message, revision=revision))
        written = peer("encode").ask({"salt": salt.hex(), "kind": kind, "msg": read["msg"]})
        back = codec.decode(bytes.fromhex(written["frame"]), trailing="error")
        assert back == message
        assert type(back) is type(message)
        if ref.one_byte_form(value):
            assert written["frame"] == frame.hex()


def test_crate_to_ours_to_crate(peer, revision):
    for salt, codec, kind, value in drawn(102, revision, finite=True, entries=3):
        written = peer("encode").ask({"salt": salt.hex(), "kind": kind, "msg": value})
        frame = bytes.fromhex(written["frame"])
        message = codec.decode(frame, trailing="error")
        assert KIND_OF[type(message)] == kind
        assert same(ff.to_json(message, revision=revision), value)
        assert codec.encode(message) == frame  # the crate's map order is kept
        assert codec.encode_payload(message).hex() == written["payload"]
        read = ask_decode(peer, codec.encode(ff.from_json(kind, value, revision=revision)), salt)
        assert same(read["msg"], value)


def test_numbers_that_json_cannot_carry_reach_the_crate(peer, codec, revision):
    """NaN and the infinities: as null in the crate's JSON, spelt out in its debug text."""
    spelt = set()
    for kind, value in messages(103, 600, revision=revision):
        message = ff.from_json(kind, value, revision=revision)
        read = ask_decode(peer, codec.encode(message))
        assert same(read["msg"], ff.to_json(message, revision=revision))
        spelt |= {word for word in ("NaN", "inf", "-inf") if f" {word}" in read["debug"]}
    assert spelt == {"NaN", "inf", "-inf"}


def test_ours_and_the_oracle(revision):
    """The same, NaN and the infinities among them, both ways and under many salts."""
    for salt, codec, kind, value in drawn(104, revision, entries=4):
        frame = ref.encode_frame(salt, kind, value, revision)
        message = codec.decode(frame, trailing="error")
        assert same(oracle_form(message, revision), (kind, value))
        assert codec.encode(message) == codec.encode(ff.from_json(kind, value, revision=revision)) == frame
        assert same(ref.decode_frame(salt, codec.encode(message), revision), [kind, value, 0])


def test_a_whole_batch_goes_to_the_crate(peer, codec, revision):
    values = list(messages(105, 500, revision=revision, finite=True, entries=2))
    buffer = codec.encode_many([ff.from_json(kind, value, revision=revision) for kind, value in values])
    for kind, value in values:
        read = ask_decode(peer, buffer)
        assert (read["kind"], same(read["msg"], value)) == (kind, True)
        buffer = buffer[len(buffer) - read["left"]:]
    assert buffer == b""


def test_a_whole_batch_comes_from_the_crate(peer, codec, revision):
    for prefixed in (False, True):
        values = list(messages(106, 500, revision=revision, finite=True, entries=2))
        frames = [
            bytes.fromhex(peer("encode").ask({"salt": SALT.hex(), "kind": kind, "msg": value})["frame"])
            for kind, value in values
        ]
        buffer = b"".join(ref.add_prefix(frame) if prefixed else frame for frame in frames)
        decoded, consumed = codec.decode_many(buffer, prefixed=prefixed, trailing="error")
        assert consumed == len(buffer)
        for message, (_, value) in zip(decoded, values, strict=True):
            assert same(ff.to_json(message, revision=revision), value)
        assert codec.encode_many(decoded, prefixed=prefixed) == buffer


def test_damaged_payloads_with_fresh_macs_end_alike(peer, codec, revision):
    rng = random.Random(107)
    outcomes = set()
    for kind, value in messages(107, 3000, revision=revision, entries=2):
        payload = codec.encode_payload(ff.from_json(kind, value, revision=revision))
        damaged = damage(rng, payload[:200] if rng.random() < 0.3 else payload)
        if rng.random() < 0.2 and damaged:
            damaged = damage(rng, damaged)
        frame = signed_frame(NUMBER_OF[kind], damaged, revision)
        crate = ask_decode(peer, frame)
        assert same_outcome(codec, crate, frame), (frame.hex(), crate)
        outcomes.add((kind, "error" in crate))
    assert outcomes == {(kind, failed) for kind in NUMBER_OF if kind in ref.SCHEMA for failed in (False, True)}


def test_short_random_payloads_end_alike(peer, codec, revision):
    rng = random.Random(108)
    accepted = 0
    for _ in range(3000):
        # Mostly small bytes: they are variants, tags and counts that exist.
        size = rng.randrange(40)
        payload = bytes(rng.choice((0, 1, 2, 3, rng.randrange(20), rng.randrange(256))) for _ in range(size))
        frame = signed_frame(rng.choice(list(ref.KINDS)), payload, revision)
        crate = ask_decode(peer, frame)
        assert same_outcome(codec, crate, frame), (frame.hex(), crate)
        accepted += "error" not in crate
    assert 500 < accepted < 2500


def test_damaged_frames_end_alike(peer, codec, revision):
    rng = random.Random(109)
    outcomes = set()
    for kind, value in messages(109, 800, revision=revision):
        frame = damage(rng, codec.encode(ff.from_json(kind, value, revision=revision))[:60])
        crate = ask_decode(peer, frame)
        assert same_outcome(codec, crate, frame), (frame.hex(), crate)
        outcomes |= crate.keys() & {"eof", "error", "msg"}
    assert outcomes == {"eof", "error", "msg"}


def test_reserved_kinds_go_both_ways(peer, codec):
    for kind in (ff.MsgKind.PARAM_SNAPSHOT_META, ff.MsgKind.HEARTBEAT):
        frame = codec.encode(ff.Reserved(kind, b"\1\2\3"))
        crate = ask_decode(peer, frame)
        assert (crate["payload"], crate["left"]) == ("010203", 0)
        assert same_outcome(codec, crate, frame)


@pytest.mark.parametrize("size", [1 << 62, 1 << 63])
def test_a_huge_text_is_refused_where_it_takes_the_crate_down(peer, size, codec, revision):
    frame = signed_frame(2, bytes([13, 0]) + ref.put_varint(size), revision)
    crate = ask_decode(peer, frame)
    assert crate in TAKEN_DOWN
    assert same_outcome(codec, crate, frame)


def test_conversions_end_alike(peer, revision):
    outcomes = set()
    for _, value in messages(110, 1000, revision=revision, finite=True, entries=2, kinds=("Control",)):
        crate = peer("convert").ask({"msg": value})
        message = ff.from_json("Control", value, revision=revision)
        try:
            converted = ff.control_wire_to_msg(message)
        except ff.ReservedTargetError:
            assert "error" in crate
            outcomes.add("error")
            continue
        assert ("none" if converted is None else "some") in crate
        reason = getattr(converted, "reason", None)
        assert crate.get("reason") == (reason if reason is None else reason.name.title().replace("_", ""))
        outcomes.add("none" if converted is None else "some")
    assert outcomes == {"error", "none", "some"}


def test_every_save_reason_converts_alike(peer):
    for byte in range(256):
        crate = peer("convert").ask({"msg": {"ShutdownWithSave": {"reason": byte}}})
        reason = ff.control_wire_to_msg(ff.ShutdownWithSave(byte)).reason
        assert crate["reason"] == reason.name.title().replace("_", "")


def test_json_of_numbers_beyond_a_single_is_read_alike(peer, codec, revision):
    metrics = messages(111, 50, revision=revision, finite=True, kinds=("Metrics",))
    value = next(value for _, value in metrics if value["resources"])
    for number in (0.1, 1e39, -1e39, 3.4028235677973366e38, 1e-46, 16777217):
        value = {**value, "resources": {**value["resources"], "cpu_percent": number}}
        crate = peer("encode").ask({"salt": SALT.hex(), "kind": "Metrics", "msg": value})
        assert crate["frame"] == codec.encode(ff.from_json("Metrics", value, revision=revision)).hex()


def test_handshakes(peer, revision):
    for salt in salts(112, 12):
        rank, world = int.from_bytes(salt[:4], "little"), int.from_bytes(salt[4:8], "little")
        codec, sig = ff.Codec(salt, revision), salt * 2
        crate = peer("wire").ask(
            {"op": "handshake", "salt": salt.hex(), "rank": rank, "world": world, "model_sig": sig.hex()}
        )
        sig = sig if revision == "0.8" else None
        assert crate == {
            "control_rank": codec.control_hello(rank, world, sig).hex(), "control_ack": codec.control_ack().hex(),
            "data_ack": codec.data_ack().hex(),
        }
        assert codec.check_control_hello(bytes.fromhex(crate["control_rank"]), world) == (rank, sig)


@pytest.mark.parametrize("text", [
    "00" * 16, "aB" * 16, " \t" + "12" * 16 + "\r\n", "12" * 15 + "1", "12" * 17, "1 " * 16, "+1" * 16,
    "0x" + "11" * 15,
    "\u0661" * 32, "g" * 32, "", "12" * 8 + "  " + "12" * 7,
])
def test_salts(peer, text):
    crate = peer("wire").ask({"op": "salt", "hex": text})
    if "error" in crate:
        with pytest.raises(ValueError, match="salt"):
            ff.Codec(text)
    else:
        assert ff.Codec(text).mac(b"x") == ff.Codec(bytes.fromhex(crate["salt"])).mac(b"x")

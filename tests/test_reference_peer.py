"""The oracle against the published crate: equal values, equal bytes, equal refusals."""

from __future__ import annotations

import random
import struct

import pytest
import reference as ref
from conftest import SALT, same
from generate import FLOATS, FRAME_KINDS, damage, messages, round_frames, round_groups, salts
from peer import ABORTED

MESSAGES, ROUNDS = 1200, 500


def refusal(call, *args):
    """What the oracle refuses a call for, or None."""
    try:
        call(*args)
    except ref.WireError as error:
        return error.what
    return None


@pytest.fixture
def peer(peer, revision):
    """The reference peer of the revision at hand."""
    return lambda mode: peer(mode, revision)


def same_outcome(crate, frame, revision):
    """Whether the oracle makes of a control frame what the crate made of it."""
    if "error" in crate or "eof" in crate:
        return refusal(ref.decode_frame, SALT, frame, revision) is not None
    kind, message, left = ref.decode_frame(SALT, frame, revision)
    if kind not in ref.SCHEMA:
        return crate == {"kind": kind, "payload": message.hex(), "left": left}
    return (crate["kind"], crate["left"]) == (kind, left) and same(crate["msg"], ref.to_json(message))


def test_crate_reads_what_the_oracle_writes(peer, revision):
    decode = peer("decode")
    values = messages(1, MESSAGES, revision=revision, entries=3)
    for salt, (kind, message) in zip(salts(1, MESSAGES), values, strict=True):
        frame = ref.encode_frame(salt, kind, message, revision=revision)
        crate = decode.ask({"salt": salt.hex(), "frame": frame.hex() + "00"})
        assert (crate["kind"], crate["left"]) == (kind, 1)
        assert same(crate["msg"], ref.to_json(message))


def test_crate_writes_what_the_oracle_writes(peer, revision):
    encode = peer("encode")
    values = messages(2, MESSAGES, revision=revision, finite=True)
    for salt, (kind, message) in zip(salts(2, MESSAGES), values, strict=True):
        crate = encode.ask({"salt": salt.hex(), "kind": kind, "msg": message})
        assert crate["frame"] == ref.encode_frame(salt, kind, message, revision=revision).hex()
        assert crate["payload"] == ref.encode_payload(kind, message, revision=revision).hex()
        read, read_message, left = ref.decode_frame(salt, bytes.fromhex(crate["frame"]), revision=revision)
        assert (read, left) == (kind, 0)
        assert same(read_message, message)


def test_oracle_reads_maps_in_the_order_of_the_crate(peer, revision):
    for kind, message in messages(3, 500, revision=revision, finite=True, entries=6):
        crate = peer("encode").ask({"salt": SALT.hex(), "kind": kind, "msg": message})
        payload = bytes.fromhex(crate["payload"])
        read, used = ref.decode_payload(kind, payload, revision=revision)
        assert used == len(payload) == len(ref.encode_payload(kind, message, revision=revision))
        assert same(read, message)


def test_damaged_payloads_end_alike(peer, revision):
    rng = random.Random(4)
    numbers = {kind: ref.number_of(kind, ref.KINDS) for kind in FRAME_KINDS}
    outcomes = set()
    for kind, message in messages(4, MESSAGES, revision=revision):
        payload = ref.encode_payload(kind, message, revision=revision)
        damaged = damage(rng, payload[:200] if rng.random() < 0.3 else payload)
        frame = ref.sign_frame(SALT, numbers[kind], damaged, revision)
        crate = peer("decode").ask({"salt": SALT.hex(), "frame": frame.hex()})
        assert same_outcome(crate, frame, revision), (frame.hex(), crate)
        outcomes.add((kind, "error" in crate))
    assert outcomes == {(kind, failed) for kind in FRAME_KINDS for failed in (False, True)}


def test_damaged_frames_end_alike(peer, revision):
    rng = random.Random(5)
    for kind, message in messages(5, 500, revision=revision):
        frame = damage(rng, ref.encode_frame(SALT, kind, message, revision=revision)[:60])
        crate = peer("decode").ask({"salt": SALT.hex(), "frame": frame.hex()})
        assert same_outcome(crate, frame, revision), (frame.hex(), crate)


def test_reserved_kinds(peer, revision):
    for kind in ("ParamSnapshotMeta", "Heartbeat"):
        frame = ref.encode_frame(SALT, kind, b"\1\2\3", revision=revision)
        crate = peer("decode").ask({"salt": SALT.hex(), "frame": frame.hex()})
        assert crate == {"kind": kind, "payload": "010203", "left": 0}


@pytest.mark.parametrize(("size", "crate_says"), [(1 << 62, ABORTED), (1 << 63, {"error": "panic"})])
def test_a_huge_text_takes_the_crate_down_and_the_peer_comes_back(peer, size, crate_says, revision):
    frame = ref.sign_frame(SALT, 2, bytes([13, 0]) + ref.put_varint(size), revision)
    assert peer("decode").ask({"salt": SALT.hex(), "frame": frame.hex()}) == crate_says
    assert refusal(ref.decode_frame, SALT, frame, revision) == "payload"
    good = ref.encode_frame(SALT, "Timing", {"Exiting": {"rank": 1}}, revision=revision)
    answers = peer("decode").ask_many([{"salt": SALT.hex(), "frame": good.hex()}] * 2)
    assert [answer["msg"] for answer in answers] == [{"Exiting": {"rank": 1}}] * 2


def test_conversion(peer, revision):
    outcomes = set()
    for _, message in messages(6, 400, revision=revision, finite=True, kinds=("Control",)):
        crate = peer("convert").ask({"msg": message})
        ours = ref.control_convert(message)
        assert ("error" in crate, "none" in crate) == (ours["outcome"] == "error", ours["outcome"] == "none")
        assert crate.get("reason") == ours.get("reason")
        outcomes.add(ours["outcome"])
    assert outcomes == {"message", "none", "error"}


def crate_frame(frame):
    """The frame of an answer, its weight from `weight_bits`: an infinite one is null otherwise."""
    weight, = struct.unpack(">d", bytes.fromhex(frame["weight_bits"]))
    return {"kind": frame["kind"], "weight": weight, "tensors": frame["tensors"]}


def test_round_frames(peer, revision):
    round_ = peer("round")
    for salt, frame in zip(salts(7, ROUNDS), round_frames(7, ROUNDS, revision), strict=True):
        raw = ref.encode_round(salt, frame, revision)
        assert round_.ask({"op": "encode", "salt": salt.hex(), "frame": frame}) == {"bytes": raw.hex()}
        crate = round_.ask({"op": "decode", "salt": salt.hex(), "bytes": raw.hex() + "0000"})
        assert crate["left"] == 2
        assert same(crate_frame(crate["frame"]), frame)
        assert same(ref.decode_round(salt, raw, revision=revision), [frame, 0])


def test_damaged_round_frames_end_alike(peer, revision):
    rng = random.Random(8)
    for frame in round_frames(8, ROUNDS, revision):
        raw = damage(rng, ref.encode_round(SALT, frame, revision)[:-8])
        if rng.random() < 0.9:
            raw += ref.mac8(SALT, raw)
        crate = peer("round").ask({"op": "decode", "salt": SALT.hex(), "bytes": raw.hex()})
        what = refusal(ref.decode_round, SALT, raw, ref.FRAME_CEILING, revision)
        if what is None:
            assert same([crate_frame(crate["frame"]), crate["left"]], ref.decode_round(SALT, raw, revision=revision))
        else:
            # The crate's reader leaves dtype and shape to its reducer.
            assert ("frame" in crate) == (what == "tensor")


@pytest.mark.parametrize(("op", "ours"), [("sum", ref.sum_frames), ("reduce", ref.reduce_frames)])
def test_sum_and_reduce(peer, revision, op, ours):
    rng = random.Random(9)
    outcomes = set()
    for group in round_groups(9, 300, revision):
        if op == "reduce":
            group = [frame if rng.random() < 0.8 else None for frame in group]
        crate = peer("round").ask({"op": op, "frames": group})
        outcomes.add("error" in crate)
        if "error" in crate:
            assert refusal(ours, group, revision) == "tensor", crate
        else:
            assert same(ref.plain_nans(ours(group, revision)), ref.plain_nans(crate_frame(crate["frame"])))
    assert outcomes == {False, True}


def test_mux_records(peer, revision):
    rng, ranks = random.Random(10), (0, 1, 255, 65536, (1 << 32) - 1)
    records = [{"record": "Data", "rank": rank, "payload": rng.randbytes(rank % 300).hex()} for rank in ranks]
    records += [{"record": name, "payload": rng.randbytes(9).hex()} for name in ("HostFrame", "Broadcast")]
    relays = messages(10, 200, revision=revision, kinds=("Relay",))
    records += [{"record": "Control", "msg": message} for _, message in relays]
    for record in records:
        raw = ref.encode_mux(SALT, record, revision=revision)
        assert peer("wire").ask({"op": "mux", "salt": SALT.hex(), **record}) == {"bytes": raw.hex()}
        assert ref.decode_mux(SALT, raw, revision=revision) == ({"rank": 0, **record}, 0)
        payload = damage(rng, raw[25:] or b"?")
        header = raw[:13] + struct.pack("<I", len(payload))
        for bad in (damage(rng, raw), header + ref.mac8(SALT, header + payload) + payload):
            crate = peer("wire").ask({"op": "mux_decode", "salt": SALT.hex(), "bytes": bad.hex()})
            assert (refusal(ref.decode_mux, SALT, bad, ref.FRAME_CEILING, revision) is None) == ("debug" in crate)


def test_handshakes(peer, revision):
    for salt in salts(11, 8):
        rank, world = struct.unpack("<II", salt[:8])
        sig = salt * 2
        crate = peer("wire").ask(
            {"op": "handshake", "salt": salt.hex(), "rank": rank, "world": world, "model_sig": sig.hex()}
        )
        sig = sig if revision == "0.8" else b""
        assert crate == {
            "control_rank": ref.control_hello(salt, rank, world, sig, revision).hex(),
            "control_ack": ref.control_ack(salt, revision=revision).hex(),
            "data_ack": ref.data_ack(revision=revision).hex(),
        }


def test_masses(peer):
    rng = random.Random(12)
    for _ in range(300):
        n = rng.choice((rng.choice(FLOATS), float(rng.randrange(2000)), rng.uniform(0, 1e6)))
        gamma = rng.choice((1.0, 0.0, 0.5, -1.0, 2.0, 400.0, rng.uniform(-3, 3)))
        assert peer("wire").ask({"op": "mass", "n": n, "gamma": gamma}) == {
            "gamma_mass_bits": struct.pack(">d", ref.gamma_mass(n, gamma)).hex(),
            "mover_mass": ref.mover_mass(n),
            "realized": ref.is_realized(n),
        }


@pytest.mark.parametrize("text", [
    "00" * 16, "aB" * 16, " \t" + "12" * 16 + "\r\n", "12" * 15 + "1", "12" * 17, "1 " * 16, "+1" * 16,
    "0x" + "11" * 15, "\u0661" * 32, "g" * 32, "",
])
def test_salts(peer, text):
    crate = peer("wire").ask({"op": "salt", "hex": text})
    if "error" in crate:
        assert refusal(ref.parse_salt, text) == "value"
    else:
        assert ref.parse_salt(text).hex() == crate["salt"]


def test_frame_ceilings(peer):
    for model_bytes in (0, (32 << 20) - 1, (32 << 20) + 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        crate = peer("wire").ask({"op": "frame_ceiling", "model_bytes": model_bytes})
        assert crate == {"ceiling": ref.frame_ceiling(model_bytes)}

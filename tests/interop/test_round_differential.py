"""Round frames, sums and mux records against the published crate, live: equal values, equal bytes, equal refusals."""

from __future__ import annotations

import random
import struct

import pytest
import reference as ref
from conftest import SALT, same
from generate import messages, round_frames, round_groups, salts
from round_support import form_of, frame_of, numpy_holds

import flodl_fast as ff

ROUNDS = 600


def held(seed, n, revision="0.6"):
    """`n` generated frames whose every tensor NumPy can hold."""
    forms = round_frames(seed, 2 * n, revision)
    frames = (form for form in forms if all(numpy_holds(t["shape"]) for t in form["tensors"]))
    return [next(frames) for _ in range(n)]


def crate_form(answer):
    """The frame of an answer; its weight from the bits, as JSON has no infinity."""
    weight, = struct.unpack(">d", bytes.fromhex(answer["weight_bits"]))
    return {"kind": answer["kind"], "weight": weight, "tensors": answer["tensors"]}


def all_ways(codec, raw):
    """A frame by copy and by view, the zeros elided that were, and what the same frame is into given arrays."""
    copied = codec.decode_round(raw)
    for tensor in (out := [t.copy() for t in copied.tensors]):
        tensor[...] = 1
    written = codec.decode_round(raw, out=out)
    assert same(form_of(written), form_of(copied))
    assert same(form_of(codec.decode_round(raw, copy=False)), form_of(copied))
    return codec.decode_round(raw, elided="keep"), codec.decode_round(raw, copy=False, elided="keep")


def test_ours_to_crate_to_ours(peer, revision):
    round_ = peer("round", revision)
    for salt, form in zip(salts(51, ROUNDS), held(51, ROUNDS, revision), strict=True):
        codec = ff.Codec(salt, revision)
        raw = codec.encode_round(frame_of(form))
        read = round_.ask({"op": "decode", "salt": salt.hex(), "bytes": raw.hex() + "abcd"})
        assert read["left"] == 2
        assert same(crate_form(read["frame"]), form)
        written = round_.ask({"op": "encode", "salt": salt.hex(), "frame": crate_form(read["frame"])})
        assert written["bytes"] == raw.hex()
        for frame in all_ways(codec, bytes.fromhex(written["bytes"])):
            assert same(form_of(frame), form)


def test_crate_to_ours_to_crate(peer, revision):
    round_ = peer("round", revision)
    for salt, form in zip(salts(52, ROUNDS), held(52, ROUNDS, revision), strict=True):
        codec = ff.Codec(salt, revision)
        raw = bytes.fromhex(round_.ask({"op": "encode", "salt": salt.hex(), "frame": form})["bytes"])
        layout = ff.TensorLayout.from_frame(codec, raw)
        for frame in all_ways(codec, raw):
            assert codec.encode_round(frame) == raw
            assert layout.encode(codec, frame.tensors, frame.kind, frame.weight) == raw
        read = round_.ask({"op": "decode", "salt": salt.hex(), "bytes": codec.encode_round(frame).hex()})
        assert read["left"] == 0
        assert same(crate_form(read["frame"]), form)


def test_damaged_frames_end_alike(peer, revision):
    rng, outcomes = random.Random(53), set()
    codec = ff.Codec(SALT, revision)
    for form in held(53, ROUNDS, revision):
        body = bytearray(codec.encode_round(frame_of(form))[:-8])
        for _ in range(rng.choice((1, 1, 2))):
            # Mostly where the metadata is, so that the MAC is not all that finds it.
            body[rng.randrange(min(len(body), 60))] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        raw = bytes(body) + (ref.mac8(SALT, body) if rng.random() < 0.9 else rng.randbytes(8))
        raw = raw[:rng.randrange(len(raw))] if rng.random() < 0.2 else raw
        crate = peer("round", revision).ask({"op": "decode", "salt": SALT.hex(), "bytes": raw.hex()})
        try:
            frame = codec.decode_round(raw, elided="keep")
        except ff.TensorError:
            # The crate's reader leaves dtypes and sizes to its reducer, and holds more dimensions than NumPy.
            outcomes.add("tensor")
            if "frame" in crate:
                again = peer("round", revision).ask({"op": "sum", "frames": [crate["frame"]]})
                assert "error" in again or not all(numpy_holds(t["shape"]) for t in crate["frame"]["tensors"])
        except ff.LimitError:
            # Zeros above the limit are ours alone to refuse.
            assert "frame" not in crate or revision == "0.8"
        except ff.DecodeError:
            assert "frame" not in crate
            outcomes.add("error")
        else:
            assert same(form_of(frame), crate_form(crate["frame"]))
            outcomes.add("frame")
    assert outcomes == {"frame", "tensor", "error"}


@pytest.mark.parametrize(("op", "ours"), [("sum", ff.sum_frames), ("reduce", ff.reduce_frames)], ids=["sum", "reduce"])
def test_sums_and_reductions(peer, revision, op, ours):
    rng, outcomes = random.Random(54), set()
    for group in round_groups(54, ROUNDS, revision):
        if not all(numpy_holds(tensor["shape"]) for form in group for tensor in form["tensors"]):
            continue
        if op == "reduce":
            group = [form if rng.random() < 0.8 else None for form in group]
        crate = peer("round", revision).ask({"op": op, "frames": group})
        outcomes.add("error" in crate)
        frames = [form and frame_of(form) for form in group]
        if "error" in crate:
            with pytest.raises(ff.TensorError):
                ours(frames)
        else:
            assert same(ref.plain_nans(form_of(ours(frames))), ref.plain_nans(crate_form(crate["frame"])))
    assert outcomes == {False, True}


def test_the_sum_of_a_round_that_crossed_the_wire(peer, revision):
    codec = ff.Codec(SALT, revision)
    for form in held(55, 50, revision):
        raw = codec.encode_round(frame_of(form))
        views = [codec.decode_round(raw, copy=False, elided="keep") for _ in range(3)]
        crate = peer("round", revision).ask({"op": "reduce", "frames": [form] * 3})
        assert same(ref.plain_nans(form_of(ff.reduce_frames(views))), ref.plain_nans(crate_form(crate["frame"])))


def mux_cases():
    """Records of every kind: ours, and the question to the crate."""
    rng = random.Random(56)
    for rank in (0, 1, 2, 255, 65_536, (1 << 32) - 1, *(rng.randrange(1 << 32) for _ in range(94))):
        payload = rng.randbytes(rng.choice((0, 1, 30, 31, 39, 40, 100, 1000)))
        yield (ff.MuxRecord(ff.MuxKind.DATA, rank, payload), {"record": "Data", "rank": rank, "payload": payload.hex()})
    for kind, name in ((ff.MuxKind.HOST_FRAME, "HostFrame"), (ff.MuxKind.BROADCAST, "Broadcast")):
        for form in held(57, 50):
            payload = ref.encode_round(SALT, form)
            yield ff.MuxRecord(kind, 0, payload), {"record": name, "payload": payload.hex()}
    for _, value in messages(58, 300, kinds=("Relay",)):
        yield ff.MuxRecord(ff.MuxKind.CONTROL, 0, ff.from_json("Relay", value)), {"record": "Control", "msg": value}


def test_mux_records(peer):
    codec, wire = ff.Codec(SALT), peer("wire")
    for record, question in mux_cases():
        raw = codec.encode_mux(record)
        assert wire.ask({"op": "mux", "salt": SALT.hex(), **question}) == {"bytes": raw.hex()}
        assert codec.decode_mux(raw) == record
        assert "debug" in wire.ask({"op": "mux_decode", "salt": SALT.hex(), "bytes": raw.hex()})


def test_damaged_mux_records_end_alike(peer):
    rng, outcomes, codec = random.Random(59), set(), ff.Codec(SALT)
    for record, _ in mux_cases():
        raw = bytearray(codec.encode_mux(record))
        match rng.randrange(5):
            case 0:
                raw = raw[:rng.randrange(len(raw))]
            case 1:
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            case 2:
                raw += rng.randbytes(3)
            case _:  # A change that is signed: of the header's kind and rank, or of the payload.
                at = rng.choice([8, 9, *range(25, min(len(raw), 40))])
                raw[at] = rng.choice((0, 1, 2, 3, 4, 5, 0xFB, 0xFF))
                raw[17:25] = ref.mac8(SALT, bytes(raw[:17] + raw[25:]))
        crate = peer("wire").ask({"op": "mux_decode", "salt": SALT.hex(), "bytes": raw.hex()})
        try:
            codec.decode_mux(raw)
        except ff.DecodeError as error:
            assert "debug" not in crate
            outcomes.add(type(error).__name__)
        else:
            assert "debug" in crate
            outcomes.add("record")
    assert outcomes > {"record", "TruncatedError", "AuthenticationError", "UnknownKindError", "PayloadError"}


def test_masses(peer):
    rng = random.Random(60)
    for _ in range(300):
        n = rng.choice((0.0, -0.0, -2.0, float(rng.randrange(3000)), rng.uniform(0, 1e6), 10 ** rng.uniform(-320, 308)))
        gamma = rng.choice((1.0, 0.0, 0.5, -1.0, 2.0, 400.0, rng.uniform(-3, 3)))
        assert peer("wire").ask({"op": "mass", "n": n, "gamma": gamma}) == {
            "gamma_mass_bits": struct.pack(">d", ff.gamma_mass(n, gamma)).hex(),
            "mover_mass": ff.mover_mass(n),
            "realized": ff.is_realized(n),
        }
    for size in (0, (32 << 20) + 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        assert peer("wire").ask({"op": "frame_ceiling", "model_bytes": size}) == {"ceiling": ff.frame_ceiling(size)}


def test_macs(peer):
    rng = random.Random(61)
    for salt in salts(61, 100):
        data = rng.randbytes(rng.randrange(300))
        crate = peer("wire").ask({"op": "hmac", "salt": salt.hex(), "bytes": data.hex()})
        assert crate["tag"] == ff.Codec(salt).mac(data).hex()

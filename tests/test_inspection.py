"""inspect: what it says of frames of every kind, good, damaged, cut, and without a salt."""

from __future__ import annotations

import io
import json
import os
import random
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import reference as ref
from conftest import SALT, golden_params
from generate import damage
from support import CODEC, crate_name, one_of_each, oracle_form, signed_frame, signed_record

import flodl_fast as ff
from flodl_fast.capture import CaptureWriter, Direction
from flodl_fast.inspection import FRAMINGS, inspect_frames
from flodl_fast.protocol import Revision

OTHER_SALT = bytes(16 * [7])
ROUND = CODEC.encode_round(ff.RoundFrame([np.ones((2, 3), "f4"), np.ones((), "f4")], weight=3.0))
HEARTBEAT = CODEC.encode(ff.Heartbeat(3, 1000))
MUX = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, HEARTBEAT))
FRAMES = [HEARTBEAT, ROUND, MUX, CODEC.data_ack()]


def look(data, **options):
    return list(inspect_frames(io.BytesIO(data), **{"salt": SALT, **options}))


def one(data, **options):
    (entry,) = look(data, **options)
    return entry


def until_fault(data, **options):
    """The entries, and last the error that ends them, if one does."""
    try:
        yield from inspect_frames(io.BytesIO(data), **options)
    except ff.DecodeError as error:
        yield error


def prefixed(frame):
    return len(frame).to_bytes(4, "little") + frame


def capture(*frames, revision="0.6"):
    file = io.BytesIO()
    writer = CaptureWriter(file, revision=revision)
    for i, frame in enumerate(frames):
        writer.write(frame, f"leg {i}", Direction(i % 2), time_ns=i)
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------ what frames say


PLAN = ff.EpochPlan(1, 2, 3)
WIRE = golden_params("wire", revisions=("0.6",))
MESSAGES = [message for message in one_of_each() if not isinstance(message, ff.RelayMsg.__args__)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_control_frames(message):
    frame = CODEC.encode(message)
    kind, _ = oracle_form(message)
    entry = one(frame)
    assert (entry.offset, entry.size, entry.payload) == (0, len(frame), len(frame) - 24)
    assert (entry.frame, entry.kind) == ("control", kind)
    assert entry.name == (None if kind == "Metrics" else crate_name(type(message)))
    assert (entry.mac, entry.good, entry.notes) == ("ok", True, [])
    assert entry.message == ff.to_json(message)


@pytest.mark.parametrize(
    ("message", "rank", "epoch", "step", "rest"),
    [
        (ff.Batch(1, 2.0, 3.0, 4), 1, None, 4, {"batch_ms": 2.0, "data_ms": 3.0, "batch_loss": 0.0}),
        (ff.StartEpoch(PLAN), None, 1, None, {"partition_offset": 2, "partition_size": 3}),
        (ff.Update(9, PLAN), None, 1, None, {"version": 9, "partition_offset": 2, "partition_size": 3}),
        (ff.Update(9), None, None, None, {"version": 9}),
        (ff.EvalResult(1, 2, 3, 0.5, 4.0), 1, 3, None, {"schedule_id": 2, "metric": 0.5, "elapsed_ms": 4.0}),
        (ff.SetGlobalStep(5), None, None, 5, {}),
        (ff.Checkpoint(1, 2**64 - 1), 2**64 - 1, None, None, {"version": 1}),
        (ff.NewNcclSession(b"ab", 2, 4), 2, None, None, {"uid_bytes": b"ab", "new_world_size": 4}),
        (ff.RendezvousHello(bytes(32), 2, "a"), 2, None, None, {"dataset_sig": bytes(32), "host_name": "a"}),
        (ff.JoinRankExited(2, -9), 2, None, None, {"code": -9}),
        (ff.Shutdown(), None, None, None, {}),
    ],
)
def test_rank_epoch_and_step(message, rank, epoch, step, rest):
    entry = one(CODEC.encode(message))
    assert (entry.rank, entry.epoch, entry.step) == (rank, epoch, step)
    assert {name: value for name, value in entry.fields.items() if value is not None} == rest


def test_epoch_metrics():
    entry = one(CODEC.encode(ff.EpochAggregated(ff.EpochMetrics(7, {"loss": 0.5}))))
    assert (entry.name, entry.epoch, entry.fields["scalars"]) == ("EpochAggregated", 7, {"loss": 0.5})


def test_reserved_kinds():
    entry = one(CODEC.encode(ff.Reserved(ff.MsgKind.HEARTBEAT, b"abc")))
    assert (entry.kind, entry.name, entry.payload, entry.good) == ("Heartbeat", None, 3, True)
    assert entry.notes == ["a reserved kind, which carries no message"]


@pytest.mark.parametrize("case", golden_params("round", revisions=("0.6",)))
def test_round_frames(case):
    data = bytes.fromhex(case["bytes"])
    for salt, mac in ((case["salt"], "ok"), (None, "not checked"), (OTHER_SALT, "BAD")):
        entry = one(data, salt=salt)
        assert (entry.frame, entry.kind, entry.mac, entry.size) == ("round", case["frame"]["kind"], mac, len(data))
        assert entry.fields == {"weight": case["frame"]["weight"]}
        assert [(t.dtype, list(t.shape), t.nbytes) for t in entry.tensors] == [
            ("float32", t["shape"], len(t["bytes"]) // 2) for t in case["frame"]["tensors"]
        ]
        assert entry.payload == sum(len(t["bytes"]) // 2 for t in case["frame"]["tensors"])
        assert entry.good == (mac != "BAD")


@pytest.mark.parametrize("case", [p for p in WIRE if p.values[0]["op"] == "mux"])
def test_mux_records(case):
    entry = one(bytes.fromhex(case["bytes"]), salt=case["salt"])
    assert (entry.frame, entry.kind, entry.mac, entry.fault) == ("mux", case["record"], "ok", None)
    if case["record"] == "Control":
        assert entry.message == case["msg"]
        assert entry.inner is None
    else:
        # The vectors carry random bytes, which are no frames.
        assert entry.payload == len(case["payload"]) // 2
        assert entry.rank == (case["rank"] if case["record"] == "Data" else None)
        assert entry.inner.fault is not None
        assert not entry.good


def test_a_frame_inside_a_mux_record():
    entry = one(MUX)
    assert (entry.kind, entry.rank, entry.payload, entry.mac, entry.good) == ("Data", 3, len(HEARTBEAT), "ok", True)
    assert (entry.inner.offset, entry.inner.kind, entry.inner.name) == (25, "Timing", "Heartbeat")
    assert (entry.inner.rank, entry.inner.step, entry.inner.mac) == (3, 1000, "ok")
    for kind in (ff.MuxKind.HOST_FRAME, ff.MuxKind.BROADCAST):
        entry = one(CODEC.encode_mux(ff.MuxRecord(kind, 0, ROUND)))
        assert (entry.inner.frame, entry.inner.payload, entry.rank) == ("round", 28, None)
    wrong = one(CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.HOST_FRAME, 0, HEARTBEAT)))
    assert "expected a round frame's magic" in wrong.inner.fault


def test_the_macs_inside_and_outside_are_told_apart():
    resigned = ff.Codec(OTHER_SALT).encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, HEARTBEAT))
    for salt, macs in ((SALT, ("BAD", "ok")), (OTHER_SALT, ("ok", "BAD"))):
        entry = one(resigned, salt=salt)
        assert (entry.mac, entry.inner.mac, entry.good) == (*macs, False)


@pytest.mark.parametrize("case", [p for p in WIRE if p.values[0]["op"] == "handshake"])
def test_handshakes(case):
    hello, ack = bytes.fromhex(case["control_rank"]), bytes.fromhex(case["control_ack"])
    for salt, mac in ((case["salt"], "ok"), (None, "not checked"), (OTHER_SALT, "BAD")):
        first, second, third, fourth = look(
            hello + ack + ref.data_hello(case["rank"], case["world"]) + bytes.fromhex(case["data_ack"]), salt=salt
        )
        assert (first.frame, first.rank, first.fields) == ("control hello", case["rank"], {"world": case["world"]})
        assert (first.mac, second.mac, third.mac, fourth.mac) == (mac, mac, "none", "none")
        assert (second.frame, third.frame, fourth.frame) == ("control ack", "data hello", "data ack")
        assert (third.rank, third.fields) == (case["rank"], {"world": case["world"]})
        assert [e.offset for e in (first, second, third, fourth)] == [0, 24, 40, 56]


def test_what_a_connection_to_the_controller_opens_with():
    for name, low in (("rendezvous", 0xE0), ("data", 0xE1), ("control", 0xE2), ("join", 0xE3)):
        first, second = look(bytes([low]) + bytes.fromhex("170df1") + MUX)
        assert (first.frame, first.size, first.mac, first.good) == (f"{name} channel", 4, "none", True)
        assert (second.frame, second.offset) == ("mux", 4)


# ----------------------------------------------------------------------------------------------------------------- MACs


def test_without_a_salt_everything_but_the_mac_is_told():
    for frame in (HEARTBEAT, ROUND, MUX):
        known, unknown = one(frame).to_json(), one(frame, salt=None).to_json()
        text = json.dumps(known).replace('"mac": "ok"', '"mac": "not checked"')
        assert json.dumps(unknown) == text


def test_any_changed_byte_of_any_frame_is_found():
    for frame in (HEARTBEAT, ROUND, MUX, CODEC.control_hello(1, 3), CODEC.control_ack()):
        for at in range(len(frame)):
            changed = frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]
            with suppress(ff.DecodeError):
                assert not all(entry.good for entry in look(changed)), at


def test_a_frame_with_a_bad_mac_does_not_hide_those_after_it():
    bad = HEARTBEAT[:8] + bytes(8) + HEARTBEAT[16:]
    assert [entry.mac for entry in look(HEARTBEAT + bad + HEARTBEAT)] == ["ok", "BAD", "ok"]


def test_join_frames_of_open_admission_are_signed_with_zeros():
    open_codec = ff.Codec(bytes(16))
    assert one(open_codec.encode(ff.JoinReject("no"))).mac == "zero salt"
    assert one(open_codec.encode(ff.JoinReject("no"))).good
    assert one(CODEC.encode(ff.JoinReject("no"))).mac == "ok"
    # Anyone can sign with zeros: only where the protocol does is it right.
    assert one(open_codec.encode(ff.Heartbeat(3, 1))).mac == "BAD"


# -------------------------------------------------------------------------------------------------------------- framing


def test_each_framing():
    streams = {
        "control": [HEARTBEAT, CODEC.encode(ff.SyncNow())],
        "round": [ROUND, CODEC.encode_round(ff.RoundFrame([]))],
        "mux": [MUX, CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.HOST_FRAME, 0, ROUND))],
    }
    for name, frames in streams.items():
        found = look(b"".join(frames), framing=name)
        assert [(entry.frame, entry.size) for entry in found] == [(name, len(frame)) for frame in frames]
        assert look(b"".join(frames)) == found
        if name != "mux":
            inside = look(b"".join(map(prefixed, frames)), framing=f"prefixed-{name}")
            assert [(entry.frame, entry.size, entry.offset) for entry in inside] == [
                (name, len(frames[0]), 4), (name, len(frames[1]), 8 + len(frames[0])),
            ]
            assert look(b"".join(map(prefixed, frames))) == inside


def test_a_whole_leg_is_detected():
    leg = CODEC.control_hello(1, 3) + prefixed(HEARTBEAT) + prefixed(CODEC.encode(ff.Exiting(3)))
    assert [entry.frame for entry in look(leg)] == ["control hello", "control", "control"]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_no_bytes_are_no_frames(framing):
    assert look(b"", framing=framing) == []


def test_another_framing_than_the_bytes_have():
    for data, framing, error in (
        (ROUND, "control", ff.BadMagicError),
        (HEARTBEAT, "round", ff.BadMagicError),
        (HEARTBEAT, "mux", ff.BadMagicError),
        (HEARTBEAT, "prefixed-control", ff.LimitError),
        (b"HTTP/1.1 200 OK", "auto", ff.BadMagicError),
    ):
        with pytest.raises(error) as caught:
            look(data, framing=framing)
        assert caught.value.offset == 0
    with pytest.raises(ValueError, match="framing must be one of"):
        look(b"", framing="tcp")


def test_bytes_left_in_a_prefix_are_noted_and_skipped():
    longer = (len(HEARTBEAT) + 2).to_bytes(4, "little") + HEARTBEAT + b"\xde\xad"
    first, second = look(longer + prefixed(HEARTBEAT))
    assert (first.size, first.notes, first.good) == (len(HEARTBEAT), ["2 extra bytes after the frame"], True)
    assert second.offset == len(longer) + 4


def test_bytes_left_after_a_value_are_noted():
    # CoordHeartbeat and two bytes more, under a MAC that holds.
    entry = one(bytes.fromhex("c4170df10200000035d38a7fe3a61a5b010000000300000012dead"))
    assert (entry.name, entry.good) == ("CoordHeartbeat", True)
    assert len(entry.notes) == 1
    assert "2" in entry.notes[0]


# ------------------------------------------------------------------------------------------------------- captures


def test_captures():
    data = capture(*FRAMES)
    entries = look(data)
    assert [entry.frame for entry in entries] == ["control", "round", "mux", "data ack"]
    for i, (entry, frame) in enumerate(zip(entries, FRAMES, strict=True)):
        assert (entry.time_ns, entry.direction, entry.leg) == (i, Direction(i % 2), f"leg {i}")
        assert data[entry.offset : entry.offset + entry.size] == frame
    assert entries[0].to_json() == {
        "offset": 41 - 14 + 5, "size": 29, "time_ns": 0, "leg": "leg 0", "direction": "up", "frame": "control",
        "kind": "Timing", "name": "Heartbeat", "rank": 3, "step": 1000, "payload": 5, "mac": "ok",
        "msg": {"Heartbeat": {"rank": 3, "step_count": 1000}},
    }


def test_a_bad_frame_in_a_capture_does_not_hide_those_after_it():
    entries = look(capture(HEARTBEAT[:-1], b"GET /", b"", HEARTBEAT + b"x", HEARTBEAT))
    assert [entry.good for entry in entries] == [False, False, False, True, True]
    assert entries[0].fault == "a control frame of 29 bytes ends after 28"
    assert "47455420" in entries[1].fault
    assert entries[3].notes == ["1 extra bytes after the frame"]


def test_a_capture_of_a_revision_that_is_not_supported():
    data = capture(HEARTBEAT).replace(b"\x030.6", b"\x030.9")
    with pytest.raises(ff.VersionMismatchError, match=r"'0\.9' is not supported"):
        look(data)
    assert one(data, revision="0.6").good


@pytest.mark.parametrize("asked", ["0.7", Revision.V0_7])
def test_a_capture_of_another_revision_than_asked_for_is_named(asked):
    reader = inspect_frames(io.BytesIO(capture(HEARTBEAT)), salt=SALT, revision=asked)
    assert [entry.good for entry in reader] == [True]
    assert reader.revision == (Revision.V0_7, "as asked, where the capture says 0.6")
    same = inspect_frames(io.BytesIO(capture(HEARTBEAT)), salt=SALT, revision="0.6")
    assert [entry.good for entry in same] == [True]
    assert same.revision[1] == "as asked"


# ------------------------------------------------------------------------------------------------- faults and limits


@pytest.mark.parametrize("data", [*FRAMES, prefixed(HEARTBEAT), prefixed(ROUND), CODEC.control_hello(1, 2)])
def test_every_cut_is_found(data):
    for cut in range(1, len(data)):
        found = []
        with pytest.raises(ff.TruncatedError) as caught:
            found.extend(inspect_frames(io.BytesIO(data + data[:cut]), salt=SALT))
        assert caught.value.offset == len(data)


def test_frames_before_a_fault_are_given():
    entries = inspect_frames(io.BytesIO(HEARTBEAT * 2 + b"garbage!"), salt=SALT)
    assert next(entries).good
    assert next(entries).good
    with pytest.raises(ff.BadMagicError, match="no frame starts with the bytes 6761726261676521") as caught:
        next(entries)
    assert caught.value.offset == 2 * len(HEARTBEAT)


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        # Shape and byte count disagree; bfloat16 under 0.6; a payload that is no message; a mux kind that nobody knows.
        ("f1170df10100000000000000000000f03f000102000000040000000000000000000000f2d76c7af37036b5", "tensor 0"),
        ("f1170df10100000000000000000000f03f0101020000000400000000000000803f0040a717aedb13586d3e", "tensor 0"),
        (signed_frame(1, b"\x14").hex(), "20"),
        (signed_record(9, b"").hex(), "mux record kind 9"),
    ],
)
def test_a_frame_that_is_wrong_in_itself(frame, fault):
    entry, after = look(bytes.fromhex(frame) + HEARTBEAT, revision="0.6")
    assert fault in entry.fault
    assert (entry.mac, entry.good, entry.size) == ("ok", False, len(frame) // 2)
    assert after.good
    assert entry.to_json()["error"] == entry.fault


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("c4170df10200000000000000000000000100000001000001", ff.LimitError),  # a control payload of 16 MiB and a byte
        ("c4170df1040000000000000000000000010000000100000000", ff.VersionMismatchError),
        ("c4170df10200000000000000000000000900000000000000", ff.UnknownKindError),
        ("f1170df101000100" + "00" * 9, ff.LimitError),
        ("f1170df10000000002" + "00" * 8, ff.UnknownKindError),
        ("f1170df10000000000000000000000f87f9db5d613cacd3dc7", ff.TensorError),
        ("d0170df1010000000100000000ffffffff0000000000000000", ff.LimitError),
        ("ffffff7f" + "c4170df1", ff.LimitError),
    ],
)
def test_a_header_that_cannot_be_ends_the_reading(data, error):
    with pytest.raises(error) as caught:
        look(HEARTBEAT + bytes.fromhex(data))
    assert caught.value.offset == len(HEARTBEAT)


def test_damage_never_raises_anything_else():
    rng = random.Random(11)
    whole = [HEARTBEAT, ROUND, MUX, prefixed(HEARTBEAT), CODEC.control_hello(1, 2), *map(CODEC.encode, MESSAGES)]
    outcomes = set()
    for i in range(3000):
        frames = rng.sample(whole, 3)
        data = capture(*frames) if i % 2 else b"".join(frames)
        for _ in range(rng.randint(1, 3)):
            data = damage(rng, data) or data
        for found in until_fault(data, salt=None if i % 3 else SALT):
            if isinstance(found, ff.DecodeError):
                assert 0 <= found.offset < len(data)
                outcomes.add(type(found))
            else:
                json.dumps(found.to_json(), allow_nan=False)
                outcomes.add(found.good)
    assert {True, False, ff.TruncatedError, ff.BadMagicError} <= outcomes


# ------------------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("frame", [HEARTBEAT, prefixed(HEARTBEAT), ROUND, MUX, capture(ROUND)])
def test_a_frame_is_given_as_soon_as_it_is_there(frame):
    reading, writing = os.pipe()
    with open(reading, "rb") as file, open(writing, "wb", buffering=0) as pipe:
        entries = inspect_frames(file, salt=SALT)
        for _ in range(2):
            pipe.write(frame)
            assert next(entries).good
        pipe.close()
        assert next(entries, None) is None


@pytest.mark.parametrize("captured", [False, True])
def test_memory_holds_a_few_frames_and_not_the_file(tmp_path, captured):
    size, count = 1 << 20, 40
    frame = CODEC.encode_round(ff.RoundFrame([np.ones(size // 4, "f4")], weight=1.0))
    path = tmp_path / "long"
    path.write_bytes(capture(*[frame] * count) if captured else frame * count)
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            assert sum(entry.good for entry in inspect_frames(file, salt=SALT)) == count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * size

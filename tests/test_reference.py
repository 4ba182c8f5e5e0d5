"""The oracle against the golden vectors and the byte tables of docs/wire.md."""

from __future__ import annotations

import math
import struct

import pytest
import reference as ref
from conftest import REVISIONS, SALT, golden_params, same
from generate import messages, round_frames

VECTOR_SALT = bytes.fromhex("00112233445566778899aabbccddeeff")


def refusal(call, *args):
    with pytest.raises(ref.WireError) as caught:
        call(*args)
    return caught.value.what


def model(weight, *values):
    tensor = {"dtype": 0, "shape": [len(values)], "bytes": struct.pack(f"<{len(values)}f", *values).hex()}
    return {"kind": "Model", "weight": weight, "tensors": [tensor]}


@pytest.mark.parametrize("case", golden_params("control", "timing", "metrics", "rendezvous", "join"))
def test_message_vectors(case):
    salt, frame, payload = (bytes.fromhex(case[key]) for key in ("salt", "frame", "payload"))
    kind, message, left = ref.decode_frame(salt, frame, case["revision"])
    assert (kind, left) == (case["kind"], 0)
    assert same(ref.to_json(message), case["msg"])
    assert same(ref.decode_payload(kind, payload, case["revision"]), [message, len(payload)])
    assert ref.encode_frame(salt, kind, message, case["revision"]) == frame
    if ref.one_byte_form(case["msg"]):
        assert ref.encode_payload(kind, case["msg"], case["revision"]) == payload


@pytest.mark.parametrize("case", golden_params("mutated"))
def test_mutated_vectors(case):
    salt, frame = bytes.fromhex(case["salt"]), bytes.fromhex(case["frame"])
    if case["outcome"] == "message":
        kind, message, _ = ref.decode_frame(salt, frame, case["revision"])
        assert kind == case["kind"]
        assert same(ref.to_json(message), case["msg"])
    else:
        what = refusal(ref.decode_frame, salt, frame, case["revision"])
        assert (what == "truncated" and len(frame) < 24) == (case["outcome"] == "eof")


@pytest.mark.parametrize("case", golden_params("convert"))
def test_convert_vectors(case):
    assert ref.control_convert(case["msg"]) == {key: case[key] for key in case.keys() - {"msg", "revision"}}


@pytest.mark.parametrize("case", golden_params("round"))
def test_round_vectors(case):
    salt, raw, revision = bytes.fromhex(case["salt"]), bytes.fromhex(case["bytes"]), case["revision"]
    assert ref.encode_round(salt, case["frame"], revision) == raw
    assert same(ref.decode_round(salt, raw, revision=revision), [case["frame"], 0])


@pytest.mark.parametrize("case", golden_params("reduce"))
def test_reduce_vectors(case):
    if "error" in case:
        assert refusal(ref.reduce_frames, case["frames"]) == "tensor"
    else:
        expected = dict(case["frame"])
        weight, = struct.unpack(">d", bytes.fromhex(expected.pop("weight_bits")))
        assert same(weight, expected["weight"])
        assert same(ref.plain_nans(ref.reduce_frames(case["frames"])), ref.plain_nans(expected))


def wire_handshake(case, salt):
    rank, world, revision = case["rank"], case["world"], case["revision"]
    sig = bytes.fromhex(case["model_sig"]) if revision == "0.8" else b""
    hello, ack = bytes.fromhex(case["control_rank"]), bytes.fromhex(case["control_ack"])
    assert (ref.control_hello(salt, rank, world, sig, revision), ref.control_ack(salt, revision)) == (hello, ack)
    assert ref.data_ack(revision) == bytes.fromhex(case["data_ack"])
    assert ref.check_control_hello(salt, hello, world, revision) == (rank, sig)
    assert refusal(ref.check_control_hello, salt, hello, world ^ 1, revision) == "world"
    ref.check_control_ack(salt, ack, revision)
    assert refusal(ref.check_control_ack, SALT, ack, revision) == "mac"


def wire_mux(case, salt):
    raw = bytes.fromhex(case["bytes"])
    record = {key: case[key] for key in ("record", "rank", "payload", "msg") if key in case}
    assert ref.encode_mux(salt, record, case["revision"]) == raw
    assert ref.decode_mux(salt, raw + b"rest", revision=case["revision"]) == ({"rank": 0, **record}, 4)


def wire_mass(case, salt):
    mass = ref.gamma_mass(case["n"], case["gamma"])
    assert struct.pack(">d", mass).hex() == case["gamma_mass_bits"]
    assert ref.mover_mass(case["n"]) == case["mover_mass"]
    assert ref.is_realized(case["n"]) is case["realized"]


def wire_hmac(case, salt):
    assert ref.mac8(salt, bytes.fromhex(case["bytes"])).hex() == case["tag"]


def wire_salt(case, salt):
    if "error" in case:
        assert refusal(ref.parse_salt, case["hex"]) == "value"
    else:
        assert ref.parse_salt(case["hex"]).hex() == case["salt"]


def wire_frame_ceiling(case, salt):
    assert ref.frame_ceiling(case["model_bytes"]) == case["ceiling"]


@pytest.mark.parametrize("case", golden_params("wire"))
def test_wire_vectors(case):
    globals()[f"wire_{case['op']}"](case, bytes.fromhex(case.get("salt", "")))


@pytest.mark.parametrize(("of", "value", "raw"), [
    ("u64", 250, "fa"), ("u64", 251, "fbfb00"), ("u64", 65535, "fbffff"), ("u64", 65536, "fc00000100"),
    ("u64", (1 << 32) - 1, "fcffffffff"), ("u64", 1 << 32, "fd0000000001000000"),
    ("u64", (1 << 64) - 1, "fdffffffffffffffff"), ("u16", 8080, "fb901f"),
    ("i32", -1, "01"), ("i32", -9, "11"), ("i32", 137, "fb1201"), ("i32", -1 << 31, "fcffffffff"),
    ("u8", 251, "fb"), ("u8", 255, "ff"), (ref.BYTES, [1, 255, 251], "0301fffb"),
    (ref.DIGEST, [7] * 32, "07" * 32),
    ("f64", -0.0, "0000000000000080"), ("f32", math.inf, "0000807f"), ("f64", math.nan, "000000000000f87f"),
    ("text", "\0", "0100"), ("text", "🦀", "04f09fa680"),
    (ref.Opt("u8"), None, "00"), (ref.Opt("u8"), 0, "0100"),
    (ref.Tuple(("f64", "u64")), [0.5, 3], "000000000000e03f03"),
    (ref.Map("u8"), {"b": 1, "a": 2}, "02016201016102"),
])
def test_bincode_both_ways(of, value, raw):
    r = ref.Reader(bytes.fromhex(raw), "payload")
    assert ref.put(of, value).hex() == raw
    assert same(ref.get(of, r), value)
    assert r.left == 0


@pytest.mark.parametrize(("of", "raw", "value"), [
    ("u64", "fb0500", 5), ("u32", "fc05000000", 5), (ref.Opt("u64"), "01fd0500000000000000", 5),
    ("text", "fb010061", "a"), (ref.Map("u8"), "02016101016102", {"a": 2}),
    (ref.SCHEMA["Control"], "fb1200", "CoordHeartbeat"),
])
def test_bincode_accepts(of, raw, value):
    assert ref.get(of, ref.Reader(bytes.fromhex(raw), "payload")) == value


@pytest.mark.parametrize(("of", "raw"), [
    ("u16", "fc05000000"), ("u32", "fd0500000000000000"), ("i32", "fd0500000000000000"),
    ("u64", "fe" + "00" * 16), ("u64", "ff"), ("u64", ""), ("u64", "fb05"), ("f64", "00" * 7),
    (ref.Opt("u8"), "02"), (ref.Opt("u8"), ""), (ref.DIGEST, "00" * 31),
    ("text", "02c328"), ("text", "03eda080"), ("text", "02c080"), ("text", "fdffffffffffffffff"),
    (ref.BYTES, "fdffffffffffffffff00"), (ref.Map("u8"), "fdffffffffffffffff"),
    (ref.SCHEMA["Control"], "14"), (ref.SCHEMA["Control"], "fd0000000000000000"),
    (ref.SCHEMA["Timing"], "0f00"),
])
def test_bincode_refuses(of, raw):
    assert refusal(ref.get, of, ref.Reader(bytes.fromhex(raw), "payload")) == "payload"


@pytest.mark.parametrize(("kind", "message"), [
    ("Timing", {"Heartbeat": {"rank": -1, "step_count": 0}}),
    ("Timing", {"Heartbeat": {"rank": 1 << 64, "step_count": 0}}),
    ("Timing", {"Heartbeat": {"rank": 1.0, "step_count": 0}}),
    ("Timing", {"Heartbeat": {"rank": True, "step_count": 0}}),
    ("Timing", {"Heartbeat": {"rank": 0}}),
    ("Timing", {"LrUpdate": {"rank": 0, "lr": None}}),
    ("Timing", {"DashboardRegister": {"rank": 0, "port": 65536}}),
    ("Timing", {"DashboardSetMetadata": {"rank": 0, "json": "\ud800"}}),
    ("Timing", "Heartbeat"), ("Timing", "SyncNow"), ("Timing", {}), ("Timing", None),
    ("Control", {"ShutdownWithSave": {"reason": 256}}),
    ("Join", {"RankExited": {"rank": 0, "code": 1 << 31}}),
    ("Rendezvous", {"Role": "Sleep"}),
    ("Rendezvous", {"Hello": {"dataset_sig": [0] * 31, "global_rank": 0, "host_name": ""}}),
])
def test_encode_refuses(kind, message):
    assert refusal(ref.encode_payload, kind, message) == "value"


@pytest.mark.parametrize(("frame", "expected"), [
    ("c4170df10200000035d38a7fe3a61a5b010000000300000012dead", ("Control", "CoordHeartbeat", 0)),
    ("c4170df102000000aa231ba3b71a056d010000000500000001fb070000",
     ("Control", {"Update": {"version": 7, "next_plan": None}}, 0)),
    ("c4170df102000000a13e7e5fb41a625d0100000003000000010700ff",
     ("Control", {"Update": {"version": 7, "next_plan": None}}, 1)),
    ("c4170df102000000dac3cf6c2ec962330100000003000000010702", "payload"),
    ("c4170df1020000002255609c07ddfe85010000000100000014", "payload"),
    ("c4170df10200000041324a348620468e02000000050000000d0002c328", "payload"),
    ("c4170df102000000" "33192ea1d804a399" "0100000003000000010700", "mac"),
    ("c4170df10200000000000000000000000100000001000001", "limit"),
    ("c4170df10200000000000000000000000100000000000001", "truncated"),
    ("c4170df10200000000000000000000000800000001000001", "kind"),
    ("c4170df10400000000000000000000000800000001000001", "version"),
    ("c5170df10400000000000000000000000800000001000001", "magic"),
    ("c5170df104000000000000000000000008000000010000", "truncated"),
    ("", "truncated"),
])
def test_frame_cases(frame, expected):
    data = bytes.fromhex(frame)
    if isinstance(expected, str):
        assert refusal(ref.decode_frame, SALT, data) == expected
    else:
        assert ref.decode_frame(SALT, data) == expected


def test_documented_frames():
    heartbeat = "c4170df1020000009f0e7e73ea8c144402000000050000000503fbe803"
    message = {"Heartbeat": {"rank": 3, "step_count": 1000}}
    assert ref.encode_frame(VECTOR_SALT, "Timing", message).hex() == heartbeat
    frame = {**model(0.0, 8.0, 0.0), "kind": "Control"}
    header, data = "f1170df1010000000100000000000000000001020000000800000000000000", "0000004100000000"
    assert ref.encode_round(VECTOR_SALT, frame).hex() == header + data + "d6362c41a8774b9e"
    assert ref.control_hello(VECTOR_SALT, 1, 3).hex() == "c2170df10200000001000000030000001d0a000b5cd6787c"
    assert ref.control_ack(VECTOR_SALT).hex() == "c3170df102000000c9f1f132b4906500"
    ack = ref.encode_mux(VECTOR_SALT, {"record": "Control", "msg": "HelloAck"})
    assert ack.hex() == "d0170df101000000020000000001000000b79a5f5343a528f301"


def test_data_hello():
    hello = ref.data_hello(1, 3)
    assert hello.hex() == "c0170df1020000000100000003000000"
    assert ref.check_data_hello(hello, 3) == 1
    ref.check_data_ack(ref.data_ack())
    assert refusal(ref.check_data_hello, hello, 2) == "world"
    assert refusal(ref.check_data_hello, hello[:-1], 3) == "truncated"
    assert refusal(ref.check_data_ack, ref.data_ack()[:4] + bytes(4)) == "version"
    assert refusal(ref.check_data_ack, hello) == "magic"


def test_reserved_kinds_carry_their_payload():
    for kind in ("ParamSnapshotMeta", "Heartbeat"):
        assert ref.decode_frame(SALT, ref.encode_frame(SALT, kind, b"any")) == (kind, b"any", 0)


@pytest.mark.parametrize(("frame", "expected"), [
    ("f1170df10100000000000000000000f03f0002000000000300000000000000000000001b27b53eef2cae21", None),
    ("f1170df100000000000000000000000080e3dfeaa2fa3264fe", None),
    ("f1170df10100000000000000000000f03f000102000000040000000000000000000000f2d76c7af37036b5", "tensor"),
    ("f1170df10100000000000000000000f03f0001020000000000000000000000d9e6dac181029229", "tensor"),
    ("f1170df10100000000000000000000f03f0101020000000400000000000000803f0040a717aedb13586d3e", "tensor"),
    ("f1170df10000000000000000000000f87f9db5d613cacd3dc7", "payload"),
    ("f1170df1000000000000000000000000800000000000000000", "mac"),
    ("f1170df10000000002", "kind"), ("f1170df101000100", "limit"), ("f2170df101000100", "magic"),
    ("f1170df1", "truncated"), ("f1170df10000010000", "truncated"),
])
def test_round_cases(frame, expected):
    data = bytes.fromhex(frame)
    if expected:
        assert refusal(ref.decode_round, SALT, data) == expected
    else:
        decoded, left = ref.decode_round(SALT, data + b"rest")
        assert left == 4
        assert ref.encode_round(SALT, decoded) == data


def test_round_ceiling_counts_all_tensors():
    tensor = {"dtype": 0, "shape": [2], "bytes": "00" * 8}
    data = ref.encode_round(SALT, {"kind": "Model", "weight": 1.0, "tensors": [tensor, tensor]})
    assert len(ref.decode_round(SALT, data, 16)[0]["tensors"]) == 2
    assert refusal(ref.decode_round, SALT, data, 15) == "limit"


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_round_weights_never_sent(weight):
    assert refusal(ref.encode_round, SALT, {"kind": "Model", "weight": weight, "tensors": []}) == "value"


def test_sum_and_reduce_as_documented():
    assert same(ref.sum_frames([model(0.0, -0.0)]), model(0.0, 0.0))
    assert same(ref.sum_frames([model(-0.0, 1.0), model(-0.0, 1.0)]), model(-0.0, 2.0))
    assert ref.reduce_frames([model(1.0, 1.0), None, model(2.0, 3.0)])["tensors"][0]["bytes"] == "abaaaa3f"
    assert ref.reduce_frames([model(0.0, 2.0), model(0.0, 4.0)]) == model(0.0, 6.0)
    assert ref.reduce_frames([model(0.5, 3e38), model(0.5, 3e38)])["tensors"][0]["bytes"] == "0000807f"
    # 1 + 2**-24 + 2**-24: rounded after each frame, not once.
    assert ref.sum_frames([model(1.0, 1.0), model(1.0, 2.0**-24), model(1.0, 2.0**-24)]) == model(3.0, 1.0)
    assert refusal(ref.reduce_frames, [None]) == "tensor"


def test_masses_at_the_ends():
    assert ref.gamma_mass(1e200, 2.0) == math.inf
    assert ref.gamma_mass(0.1, 1e300) == 0.0
    assert ref.frame_ceiling((1 << 64) - 1) == (1 << 64) - 1


def test_mux_order_of_checks():
    data = bytes.fromhex("d0170df1010000000103000000020000007b0f02ad55c4cb3b6869")
    assert ref.decode_mux(SALT, data) == ({"record": "Data", "rank": 3, "payload": "6869"}, 0)
    for at, value, what in ((0, 0, "magic"), (4, 2, "version"), (8, 5, "mac"), (9, 2, "mac"), (17, 0, "mac")):
        assert refusal(ref.decode_mux, SALT, data[:at] + bytes([value]) + data[at + 1:]) == what
    assert refusal(ref.decode_mux, SALT, data, 1) == "limit"
    assert refusal(ref.decode_mux, SALT, data[:-1]) == "truncated"
    signed = struct.pack("<IIBII", ref.MUX_RECORD, 1, 5, 0, 0)
    assert refusal(ref.decode_mux, SALT, signed + ref.mac8(SALT, signed)) == "kind"


def test_length_prefix():
    assert ref.add_prefix(b"body") == b"\4\0\0\0body"
    assert ref.take_prefixed(b"\4\0\0\0bodyrest") == (b"body", 4)
    assert refusal(ref.take_prefixed, b"\4\0\0\0bod") == "truncated"
    assert refusal(ref.take_prefixed, b"\4\0\0\0body", 3) == "limit"


def test_generated_messages_are_even_and_round_trip():
    seen = {}
    for kind, message in messages(1, 490, entries=4, kinds=tuple(ref.SCHEMA)):
        payload = ref.encode_payload(kind, message)
        again, used = ref.decode_payload(kind, payload)
        assert used == len(payload)
        assert same(again, message)
        assert ref.encode_payload(kind, again) == payload
        name = kind if kind == "Metrics" else ref.variant(message)[0]
        seen[kind, name] = seen.get((kind, name), 0) + 1
    assert set(seen.values()) == {10}
    assert len(seen) == 1 + sum(len(of.variants) for of in ref.SCHEMA.values() if isinstance(of, ref.Enum))


def test_generated_messages_are_finite_where_asked():
    drawn = list(messages(2, 450)), list(messages(2, 450, finite=True))
    finite = [all(same(ref.to_json(message), message) for _, message in batch) for batch in drawn]
    assert finite == [False, True]


def test_generated_rounds_round_trip():
    for revision in REVISIONS:
        for frame in round_frames(3, 100, revision):
            raw = ref.encode_round(SALT, frame, revision)
            assert same(ref.decode_round(SALT, raw, revision=revision), [frame, 0])

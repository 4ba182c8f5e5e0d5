"""tools/flodl.lua in tshark: every field of every message, frames over many segments, and the recorded traffic."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import SALT, golden
from packet_support import Talk, pcap

import flodl_fast as ff
from flodl_fast.inspection import inspect_frames
from flodl_fast.layout import struct_of
from flodl_fast.messages import PAYLOADS

ROOT = Path(__file__).resolve().parents[1]
TRAFFIC = sorted((ROOT / "tests" / "traffic").glob("*.pcap*"))
FILES = ("control", "timing", "metrics", "rendezvous", "join")
REVISIONS = ("0.6", "0.7", "0.8")
CODEC = ff.Codec(SALT)

tshark = shutil.which("tshark")
needs_tshark = pytest.mark.skipif(tshark is None, reason="tshark is not installed: make test-wireshark")


def run_tshark(path, *options):
    """What tshark prints of a file with the dissector, which must not fail."""
    script = ROOT / "tools" / "flodl.lua"
    command = [tshark, "-X", f"lua_script:{script}", "-r", path, *options]
    done = subprocess.run(command, capture_output=True, timeout=120)
    text = done.stderr.decode()
    assert "Lua" not in text, text
    assert done.returncode == 0, text
    return done.stdout


def dissect(path, *options):
    """The flodl fields of a file: name, shown text and bytes, in their order."""
    found = []
    for field in ElementTree.fromstring(run_tshark(path, "-T", "pdml", "-J", "flodl", *options)).iter():
        name = field.get("name", "")
        if name.startswith(("flodl.", "_ws.lua.error")):
            found.append((name, field.get("show"), bytes.fromhex(field.get("value", ""))))
    return found


def values(found, prefixes):
    """What messages say: each value by its name, as a Python value."""
    formats = {"f64": "<d", "f32": "<f"}
    got = []
    for name, show, raw in found:
        family, _, field = name.removeprefix("flodl.").partition(".")
        op = OPS.get(family, {}).get(field)
        if family not in prefixes or op is None:
            continue
        if op in formats:
            got.append((name, raw))
        elif op == "str":
            got.append((name, raw.decode()))
        elif op in ("bytes", "fixed"):
            got.append((name, raw))
        else:
            got.append((name, int(show)))
    return got


def flat(shape, value, name):
    """The values in a message in wire order, floats as their bytes; empty ones are left out."""
    if shape.op == "struct":
        for field, part in zip(shape.names, shape.parts, strict=True):
            yield from flat(part, getattr(value, field), name.partition(".")[0] + "." + field)
    elif shape.op == "opt":
        if value is not None:
            yield from flat(shape.parts[0], value, name)
    elif shape.op == "list":
        for item in value:
            yield from flat(shape.parts[0], item, name)
    elif shape.op == "map":
        for pair in value.items():
            for part, item, end in zip(shape.parts, pair, ("key", "value"), strict=True):
                yield from flat(part, item, f"{name}.{end}")
    elif shape.op == "tuple":
        for i, (part, item) in enumerate(zip(shape.parts, value, strict=True)):
            yield from flat(part, item, f"{name}.{i}")
    elif shape.op in ("f32", "f64"):
        yield "flodl." + name, struct.pack("<f" if shape.op == "f32" else "<d", value)
    elif isinstance(value, IntEnum) or value not in ("", b""):
        yield "flodl." + name, int(value) if isinstance(value, IntEnum) else value


def said(family, messages):
    return [pair for message in messages for pair in flat(struct_of(type(message)), message, family.lower())]


def ops():
    """The type of every field, by family: read from the dissector's own tables."""
    found, family = {}, None
    text = (ROOT / "tools" / "flodl.lua").read_text(encoding="utf-8")
    for line in text.partition("local FIELDS = {\n")[2].partition("\n}\n")[0].splitlines():
        if line.endswith("= {"):
            family = found.setdefault(line.split()[0], {})
        elif "=" in line:
            name, op = line.strip().rstrip(",").split(" = ")
            family[name[2:-2]] = op.strip('"')
    return found


OPS = ops()


@pytest.fixture
def record(tmp_path):
    """Writes the bytes of a stream as packets, and gives the file."""

    def write(stream, size=1400, **options):
        talk = Talk()
        packets = [*talk.open(), *(talk.up(stream[at : at + size]) for at in range(0, len(stream), size))]
        path = tmp_path / "stream.pcap"
        path.write_bytes(pcap(packets, **options))
        return path

    return write


def test_the_tables_are_up_to_date():
    command = [sys.executable, ROOT / "scripts" / "make_dissector.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_message_has_its_fields():
    assert set(OPS) == {family.lower() for family in PAYLOADS}
    assert OPS["timing"]["batch_loss"] == "f64"
    assert OPS["control"]["per_rank_loss"] == "f64"
    assert OPS["metrics"]["scalars.value.1"] == "u64"


@needs_tshark
@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("told", [False, True])
def test_every_vector(record, revision, told):
    """Also without being told the revision: where messages have more fields, the bytes say so."""
    cases = [case for name in FILES for case in golden(name, revision)]
    path = record(b"\xe3\x17\x0d\xf1" + b"".join(bytes.fromhex(case["frame"]) for case in cases))
    found = dissect(path, *(["-o", f"flodl.revision:{revision}"] if told else []))
    codec = ff.Codec(SALT, revision)
    for name in FILES:
        payloads = [bytes.fromhex(case["payload"]) for case in golden(name, revision)]
        messages = [codec.decode_payload(name.title(), payload) for payload in payloads]
        assert values(found, {name}) == said(name.title(), messages)
    assert not [field for field in found if field[0] in ("flodl.malformed", "flodl.trailing")]
    assert sum(field[0] == "flodl.mac" for field in found) == len(cases)


@needs_tshark
@pytest.mark.parametrize("revision", REVISIONS)
def test_records_and_handshakes(record, revision):
    codec = ff.Codec(SALT, revision)
    sigs = [bytes(range(32))] * 2 if revision == "0.8" else []
    hellos = [ff.RelayHello("a", [0, 7], sigs), ff.RelayHelloAck(), ff.RelayRankExit(300), ff.RelayDeclareDead(2)]
    records = [codec.encode_mux(ff.MuxRecord(ff.MuxKind.CONTROL, 0, hello)) for hello in hellos]
    beat = codec.encode(ff.Heartbeat(3, 9))
    records.append(codec.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, beat)))
    found = dissect(record(b"\xe2\x17\x0d\xf1" + b"".join(records)))
    assert values(found, {"relay"}) == said("Relay", hellos)
    assert values(found, {"timing"}) == said("Timing", [ff.Heartbeat(3, 9)])
    assert [show for name, show, _ in found if name == "flodl.mux.rank"] == ["0", "0", "0", "0", "3"]
    sig = bytes(range(32)) if revision == "0.8" else None
    leg = codec.control_hello(5, 7, sig) + len(beat).to_bytes(4, "little") + beat
    found = dissect(record(leg, size=7))
    shown = {name: show for name, show, _ in found}
    assert (shown["flodl.hello.world"], shown["flodl.timing.step_count"]) == ("7", "9")
    assert [raw for name, _, raw in found if name == "flodl.hello.model_sig"] == ([sig] if sig else [])


@needs_tshark
def test_round_frames(record):
    tensors = [np.arange(3000, dtype="f4").reshape(3, 1000), np.float32(2.5), np.zeros((2, 0), "f4")]
    frame = CODEC.encode_round(ff.RoundFrame(tensors, ff.RoundKind.MODEL, 4.0))
    found = dissect(record(CODEC.data_hello(2, 3) + len(frame).to_bytes(4, "little") + frame))
    of = lambda name: [(show, raw) for field, show, raw in found if field == f"flodl.round.{name}"]  # noqa: E731
    assert [show for show, _ in of("n_tensors")] == ["3"]
    assert [show for show, _ in of("dim")] == ["3", "1000", "2", "0"]
    assert [show for show, _ in of("nbytes")] == ["12000", "4", "0"]
    assert [raw for _, raw in of("weight")] == [struct.pack("<d", 4.0)]
    assert [raw for _, raw in of("data")] == [tensors[0].tobytes(), tensors[1].tobytes()]


@needs_tshark
def test_the_revision_that_one_is_told_counts(record):
    newer = ff.Codec(SALT, "0.7").encode(ff.EpochAggregated(ff.EpochMetrics(1, per_rank_samples=[5])))
    older = CODEC.encode(ff.EpochAggregated(ff.EpochMetrics(1)))
    for frame, revision, complaint in ((newer, "0.6", "flodl.trailing"), (older, "0.7", "flodl.malformed")):
        path = record(b"\xe3\x17\x0d\xf1" + frame)
        assert complaint in {name for name, *_ in dissect(path, "-o", f"flodl.revision:{revision}")}
        assert complaint not in {name for name, *_ in dissect(path)}


@needs_tshark
def test_a_port_that_one_is_told(tmp_path):
    """A stream whose start is missing, and which goes on inside a frame, is read from the next packet on.

    Port 7000 is another protocol's to tshark, which would not ask others about it.
    """
    beats = [len(frame).to_bytes(4, "little") + frame for frame in (CODEC.encode(ff.Heartbeat(1, n)) for n in range(3))]
    talk = Talk(server=("10.0.0.2", 7000))
    path = tmp_path / "middle.pcap"
    path.write_bytes(pcap([talk.up(beats[0][10:]), talk.up(beats[1]), talk.up(beats[2])]))
    steps = [show for name, show, _ in dissect(path, "-o", "flodl.ports:7000") if name == "flodl.timing.step_count"]
    assert steps == ["1", "2"]


@needs_tshark
def test_bytes_that_are_no_message(record):
    import reference as ref
    from support import signed_frame

    bad = [b"\x63", b"\x05\x03", b"\x05\x03\xfe", b"\x0c\x01\xfd" + b"\xff" * 8, b"\x00\x01" + bytes(16) + b"\x02\x07"]
    assert ref.KINDS[2] == "Timing"
    found = dissect(record(b"\xe3\x17\x0d\xf1" + b"".join(signed_frame(2, payload) for payload in bad)))
    assert sum(name == "flodl.malformed" for name, *_ in found) == len(bad)
    assert not [name for name, *_ in found if name == "_ws.lua.error"]


@needs_tshark
def test_damage_never_stops_it(tmp_path):
    """Many connections, each with a few frames of which some bytes are others: what they are is told, or nothing."""
    rng = random.Random(9)
    frames = [bytes.fromhex(case["frame"]) for name in FILES for case in golden(name, "0.8")]
    frames += [CODEC.encode_round(ff.RoundFrame([np.ones((2, 3), "f4")])) for _ in range(20)]
    packets = []
    for n in range(400):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 3)):
            frame[rng.randrange(4, len(frame))] = rng.choice((0, 1, 0xFB, 0xFD, 0xFF, rng.randrange(256)))
        record = CODEC.encode_mux(ff.MuxRecord(rng.choice((ff.MuxKind.DATA, ff.MuxKind.HOST_FRAME)), 0, bytes(frame)))
        stream = rng.choice((b"\xe2\x17\x0d\xf1" + record, len(frame).to_bytes(4, "little") + frame, bytes(frame)))
        talk = Talk(("10.0.1.1", 20000 + n))
        packets += [*talk.open(), talk.up(stream)]
    path = tmp_path / "damaged.pcap"
    path.write_bytes(pcap(packets))
    # As lines: text with control characters in it would be no XML.
    fields = ("-T", "fields", "-E", "separator=|", "-e", "_ws.lua.error", "-e", "flodl.malformed")
    lines = run_tshark(path, *fields).decode(errors="replace").splitlines()
    complaints = [line.partition("|") for line in lines if "|" in line]
    assert not [error for error, *_ in complaints if error]
    assert sum(bool(malformed) for *_, malformed in complaints) > 50


@needs_tshark
@pytest.mark.parametrize("path", [path for path in TRAFFIC if "cut" not in path.name], ids=lambda path: path.name)
def test_recorded_traffic_as_inspect_reads_it(path):
    found = dissect(path)
    with path.open("rb") as file:
        entries = list(inspect_frames(file, salt=SALT))
    inside = [entry.inner or entry for entry in entries]
    names = [entry.name for entry in inside if entry.name]
    assert [show for name, show, _ in found if name == "flodl.variant"] == names
    weights = [struct.pack("<d", entry.fields["weight"]) for entry in inside if entry.frame == "round"]
    assert [raw for name, _, raw in found if name == "flodl.round.weight"] == weights
    sizes = [str(tensor.nbytes) for entry in inside for tensor in entry.tensors or ()]
    assert [show for name, show, _ in found if name == "flodl.round.nbytes"] == sizes
    losses = [struct.pack("<d", entry.fields["batch_loss"]) for entry in inside if entry.name == "Batch"]
    assert [raw for name, _, raw in found if name == "flodl.timing.batch_loss"] == losses
    assert not [field for field in found if field[0] in ("flodl.malformed", "flodl.trailing")]


@needs_tshark
def test_other_traffic_is_left_alone(record):
    assert dissect(record(b"GET /state.json HTTP/1.1\r\n\r\n" * 20, size=50)) == []

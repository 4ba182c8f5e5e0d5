"""Packets: both file formats, every link layer, and streams whose segments come late, twice, cut or never."""

from __future__ import annotations

import io
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import SALT
from generate import damage
from packet_support import ACK, ETHERNET, FIN, IPV4, IPV6, LOOP, NULL, RAW, RST, SLL, SLL2, Talk, pcap, pcapng
from support import CODEC, drawn

import flodl_fast as ff
from flodl_fast.capture import Direction
from flodl_fast.inspection import inspect_frames
from flodl_fast.packets import MAX_BLOCK
from flodl_fast.protocol import Revision

TRAFFIC = Path(__file__).parent / "traffic"
HELLO = CODEC.control_hello(1, 3)
ACK_FRAME = CODEC.control_ack()
BEATS = [CODEC.encode(ff.Heartbeat(1, n)) for n in range(200)]


def prefixed(frame):
    return len(frame).to_bytes(4, "little") + frame


STREAM = HELLO + b"".join(map(prefixed, BEATS))


def inspect(data, salt=SALT, **options):
    found = inspect_frames(io.BytesIO(data), salt=salt, **options)
    return list(found), found


def cut_up(rng, stream):
    """The stream in pieces: offset and bytes."""
    cuts = sorted({0, len(stream), *(rng.randrange(len(stream)) for _ in range(40))})
    return [(a, stream[a:b]) for a, b in pairwise(cuts)]


def whole(entries):
    """Whether the entries are those of STREAM and nothing else."""
    steps = [entry.step for entry in entries if entry.name == "Heartbeat"]
    assert all(entry.good and entry.mac == "ok" and not entry.notes for entry in entries)
    return entries[0].frame == "control hello" and steps == list(range(200)) and len(entries) == 201


def until_cut(data):
    """The entries, and the error that ends them, if one does."""
    entries = []
    try:
        entries.extend(inspect_frames(io.BytesIO(data), salt=SALT))
    except ff.TruncatedError as error:
        return entries, error
    return entries, None


def conversation(talk):
    """A rank's leg: handshake, a plan down, a beat up."""
    plan = CODEC.encode(ff.StartEpoch(ff.EpochPlan(0, 0, 96)))
    return [
        *talk.open(), talk.up(HELLO), talk.down(ACK_FRAME), talk.down(prefixed(plan)), talk.up(prefixed(BEATS[0])),
        talk.up(b"", flags=ACK | FIN), talk.down(b"", flags=ACK | FIN),
    ]


WHAT = [
    ("control hello", None, Direction.UP), ("control ack", None, Direction.DOWN),
    ("control", "StartEpoch", Direction.DOWN), ("control", "Heartbeat", Direction.UP),
]


def seen(entries):
    return [(entry.frame, entry.name, entry.direction) for entry in entries]


# ------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("nanoseconds", [False, True])
def test_pcap(order, nanoseconds):
    entries, found = inspect(pcap(conversation(Talk()), order=order, nanoseconds=nanoseconds))
    assert seen(entries) == WHAT
    assert [entry.time_ns - 1_700_000_000 * 10**9 for entry in entries] == [n * 1_000_000 for n in (3, 4, 5, 6)]
    assert {(entry.leg, entry.leg_rank) for entry in entries} == {("rank 1 control", 1)}
    assert found.notes == ["9 packets, 1 TCP connections"]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("ticks", [None, 9, 0x80 | 30])
@pytest.mark.parametrize("old", [False, True])
def test_pcapng(order, ticks, old):
    packets = pcapng(conversation(Talk()), links=(ETHERNET, RAW, SLL), order=order, ticks=ticks, old=old)
    entries, _ = inspect(packets)
    assert seen(entries) == WHAT
    for entry, n in zip(entries, (3, 4, 5, 6), strict=True):
        assert abs(entry.time_ns - 1_700_000_000 * 10**9 - n * 1_000_000) <= 1


def test_sections_of_a_pcapng_file_may_differ():
    packets = conversation(Talk())
    entries, _ = inspect(pcapng(packets[:4], links=(SLL,)) + pcapng(packets[4:], order=">"))
    assert seen(entries) == WHAT


@pytest.mark.parametrize("link", [ETHERNET, NULL, LOOP, SLL, SLL2, RAW, IPV4, IPV6])
@pytest.mark.parametrize("addresses", [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")])
def test_link_layers(link, addresses):
    if (link, addresses[0][0]) in ((IPV4, "f"), (IPV6, "1")):
        addresses = addresses[::-1]  # the number tells the version: either file is read by what the packets are
    talk = Talk((addresses[0], 40000), (addresses[1], 7000))
    assert seen(inspect(pcap(conversation(talk), link=link))[0]) == WHAT


def test_vlan_tags_and_padding():
    def tagged(packet):
        return bytes(12) + bytes.fromhex("88a80001810000020800") + packet + bytes(20)

    data = pcap([tagged(packet) for packet in conversation(Talk())], link=RAW)
    assert seen(inspect(data[:20] + ETHERNET.to_bytes(4, "little") + data[24:])[0]) == WHAT


def test_ipv6_extension_headers():
    def extended(packet):
        options = bytes([6, 0, 1, 4, 0, 0, 0, 0])
        return packet[:4] + (int.from_bytes(packet[4:6], "big") + 8).to_bytes(2, "big") + b"\0" + packet[7:40] + (
            options + packet[40:]
        )

    talk = Talk(("fd00::1", 40000), ("fd00::2", 7000))
    assert seen(inspect(pcap([extended(p) for p in conversation(talk)]))[0]) == WHAT


def test_what_is_passed_over_is_told():
    fragment = bytearray(Talk().up(b"x"))
    fragment[6:8] = b"\x20\x00"
    udp = bytearray(Talk().up(b"x"))
    udp[9] = 17
    short = bytearray(Talk().up(b"x")[:14])
    short[0] = 0x40
    packets = [
        bytes(fragment), bytes(udp), Talk().up(b"x")[:30], bytes(short), *conversation(Talk(("10.0.0.9", 41000)))
    ]
    entries, found = inspect(pcap(packets))
    assert seen(entries) == WHAT
    assert found.notes[1:] == [
        "1 packets passed over: fragments of IP packets", "1 packets passed over: cut inside their headers",
        "1 packets passed over: of IP with a header that cannot be",
    ]
    _, found = inspect(pcap(conversation(Talk()), link=147))
    assert found.notes == ["9 packets, 0 TCP connections", "9 packets passed over: of link type 147, which is not read"]


@pytest.mark.parametrize("data", [pcap(conversation(Talk())), pcapng(conversation(Talk()))])
def test_every_cut_of_a_file_is_told(data):
    for cut in range(25, len(data), 7):
        entries, error = until_cut(data[:cut])
        assert seen(entries) == WHAT[: len(entries)]
        assert error is None or error.offset < cut


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (pcap([])[:24] + bytes(8) + (MAX_BLOCK + 1).to_bytes(4, "little") + bytes(4), ff.LimitError),
        (pcapng([], links=()) + bytes.fromhex("0600000008000000") + bytes(8), ff.PayloadError),
        (pcapng([], links=()) + bytes.fromhex("060000000d000000") + bytes(8), ff.PayloadError),
        (pcapng([], links=()) + bytes.fromhex("0600000014000000") + bytes(12), ff.PayloadError),
        (pcapng([Talk().up(b"x")], links=(ETHERNET,)).replace(b"\1\0\0\0\x14", b"\7\0\0\0\x14"), ff.PayloadError),
        (b"\x0a\x0d\x0d\x0a" + bytes(2), ff.TruncatedError),
    ],
)
def test_blocks_that_cannot_be(data, error):
    with pytest.raises(error) as caught:
        inspect(data)
    assert 0 <= caught.value.offset <= len(data)


def test_damage_never_raises_anything_else():
    rng = random.Random(3)
    files = [pcap(conversation(Talk())), pcapng(conversation(Talk()), links=(ETHERNET, SLL2))]
    outcomes = set()
    for i in range(600):
        data = damage(rng, files[i % 2]) or files[i % 2]
        found = inspect_frames(io.BytesIO(data), salt=SALT)
        try:
            outcomes.add(all(entry.good for entry in found))
        except ff.DecodeError as error:
            outcomes.add(type(error))
    assert {True, False, ff.TruncatedError} <= outcomes


# ------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("seed", range(6))
def test_segments_in_any_order_twice_and_overlapping(seed):
    """The sequence numbers pass 2**32 on the way."""
    rng = random.Random(seed)
    talk = Talk(first=(0xFFFFFFFF - 3000, 1))
    pieces = cut_up(rng, STREAM)
    pieces += rng.sample(pieces, 10)
    for _ in range(10):  # a retransmission that is cut elsewhere
        start = rng.randrange(len(STREAM))
        pieces.append((start, STREAM[start : start + rng.randrange(1, 400)]))
    rng.shuffle(pieces)
    packets = [*talk.open(), *(talk.up(data, at=at) for at, data in pieces)]
    entries, found = inspect(pcap(packets))
    assert whole(entries)
    assert [entry.offset for entry in entries[:3]] == [0, 28, 28 + 4 + len(BEATS[0])]
    assert any("brought nothing new" in note for note in found.notes)
    assert not any("not captured" in note for note in found.notes)


def test_an_overlap_keeps_what_came_first():
    talk = Talk()
    packets = [*talk.open(), talk.up(STREAM[:100]), talk.up(b"\xff" * 60 + STREAM[100:], at=40)]
    assert whole(inspect(pcap(packets))[0])


def test_keep_alives_and_late_retransmissions_after_the_end():
    talk = Talk()
    packets = [*talk.open(), talk.up(STREAM), talk.up(b"\0", at=len(STREAM) - 1), talk.up(b"", flags=ACK | FIN)]
    packets += [talk.up(STREAM[50:90], at=50), talk.up(b"", at=len(STREAM), flags=ACK | FIN)]
    assert whole(inspect(pcap(packets))[0])


def test_several_connections_by_turns():
    ranks = [Talk(("10.0.0.1", 40000 + n)) for n in range(3)]
    packets = [packet for turn in zip(*(conversation(talk) for talk in ranks), strict=True) for packet in turn]
    entries, found = inspect(pcap(packets))
    assert len(entries) == 12
    assert found.notes == ["27 packets, 3 TCP connections"]


def test_a_port_that_is_used_again():
    first, second = Talk(first=(5, 6)), Talk(first=(900_000, 7))
    entries, found = inspect(pcap([*conversation(first), *conversation(second)]))
    assert seen(entries) == WHAT * 2
    assert "2 TCP connections" in found.notes[0]


@pytest.mark.parametrize("first", [2, 999, 1050, 0xFFFFFFFF])
def test_a_port_that_is_used_again_by_one_whose_start_was_not_captured(first):
    old, new = Talk(), Talk(first=(first, 7))
    packets = [*map(old.up, map(prefixed, BEATS[:2])), old.up(b"late", at=2000), *new.open(), new.up(STREAM)]
    entries, found = inspect(pcap(packets))
    assert [entry.step for entry in entries[:2]] == [0, 1]
    assert whole(entries[2:203])
    assert found.notes[0].endswith("2 TCP connections")


@pytest.mark.parametrize("first", [1000, 0xFFFFFFFF])
def test_a_start_that_was_captured_late(first):
    talk = Talk(first=(first, 0))
    syn, *_ = talk.open()
    entries, found = inspect(pcap([talk.up(STREAM[:100]), syn, talk.up(STREAM[100:])]))
    assert whole(entries)
    assert found.notes == ["3 packets, 1 TCP connections"]


def test_other_traffic_is_left_out():
    status = Talk(("10.0.0.1", 50000))
    packets = [*status.open(), status.up(b"GET /state.json HTTP/1.1\r\n\r\n"), status.down(b"HTTP/1.1 200 OK\r\n")]
    entries, found = inspect(pcap([*packets, *conversation(Talk())]))
    assert seen(entries) == WHAT
    assert found.notes[1:] == ["1 of the connections carry something else than flodl"]


def test_a_segment_that_was_never_captured():
    talk = Talk()
    hole = len(HELLO) + 4 * len(prefixed(BEATS[0])) + 17  # inside the fifth beat, beyond its header's start
    packets = [*talk.open(), talk.up(STREAM[:hole]), talk.up(STREAM[hole + 50 :], at=hole + 50)]
    entries, found = inspect(pcap(packets))
    assert "50 bytes are not captured: packets that were cut short, or missed" in found.notes
    assert [note for entry in entries for note in entry.notes] == [
        "14 bytes of it are not captured", "62 bytes before it are no whole frame",
    ]
    assert [entry.step for entry in entries if entry.name == "Heartbeat"] == [0, 1, 2, 3, *range(7, 200)]
    assert all(entry.good for entry in entries)


def test_a_gap_of_a_gigabyte_takes_no_memory():
    talk = Talk()
    far = 1 << 30
    packets = [*talk.open(), talk.up(STREAM[:100]), talk.up(STREAM[24:], at=far)]
    tracemalloc.start()
    try:
        entries, _ = inspect(pcap(packets))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert [entry.step for entry in entries[1:]] == [0, 1, *range(200)]
    assert entries[3].offset == far + 4
    assert entries[3].notes == [f"{far - 24 - 2 * 31} bytes before it are no whole frame"]


def test_packets_that_are_cut_short():
    """The first bytes of each packet are enough to tell the frames and their sizes."""
    talk = Talk()
    big = prefixed(CODEC.encode_round(ff.RoundFrame([np.ones(1000, "f4")], weight=2.0)))
    packets = [*talk.open(), talk.up(CODEC.data_hello(1, 3))]
    packets += [talk.up(big[at : at + 1400]) for at in range(0, len(big), 1400)] + [talk.up(big[:1400])]
    entries, found = inspect(pcap(packets, cut=120))
    assert [(entry.frame, entry.size) for entry in entries[:2]] == [("data hello", 16), ("round", len(big) - 4)]
    assert entries[1].mac == "not checked"
    assert "bytes of it are not captured" in entries[1].notes[0]
    assert entries[1].good
    assert entries[2].notes[-1].startswith("the capture ends inside it: a round frame of")
    assert "not captured" in found.notes[-1]


@pytest.mark.parametrize("start", [1, 4, 24, 30, 55, 60, 5000])
def test_a_connection_whose_start_was_not_captured(start):
    talk = Talk()
    entries, _ = inspect(pcap([talk.up(STREAM[start:], at=start)]))
    beats = [entry for entry in entries if entry.name == "Heartbeat"]
    first = next(n for n in range(200) if len(HELLO) + n * len(prefixed(BEATS[0])) >= start)
    assert [entry.step for entry in beats] == list(range(first, 200))
    assert all(entry.good for entry in entries)
    at_a_frame = start in (24, 55)
    assert at_a_frame or "are no whole frame" in entries[0].notes[0]


def test_who_dialled_is_seen_from_the_frames():
    """Without a handshake the lower port is taken for the server's, until a frame shows otherwise."""
    talk = Talk(("10.0.0.1", 100), ("10.0.0.2", 7000))
    packets = [talk.up(prefixed(BEATS[0])), talk.down(prefixed(CODEC.encode(ff.Throttle())))]
    entries, _ = inspect(pcap(packets))
    assert [(e.name, e.direction) for e in entries] == [("Heartbeat", Direction.UP), ("Throttle", Direction.DOWN)]


def test_records_are_not_taken_for_what_they_carry():
    records = [CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 1, beat)) for beat in BEATS[:20]]
    rounds = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.HOST_FRAME, 0, CODEC.encode_round(ff.RoundFrame([]))))
    stream = b"\xe2\x17\x0d\xf1" + b"".join(records[:10]) + rounds + b"".join(records[10:])
    hole = 4 + 3 * len(records[0]) + 2
    talk = Talk()
    entries, _ = inspect(pcap([*talk.open(), talk.up(stream[:hole]), talk.up(stream[hole + 20 :], at=hole + 20)]))
    assert [e.inner.step for e in entries if e.inner is not None and e.inner.name] == [0, 1, 2, *range(4, 20)]


def test_a_connection_that_ends_inside_a_frame():
    for flags, text in ((FIN | ACK, "the connection ends inside it"), (RST, "the connection ends inside it")):
        talk = Talk()
        entries, _ = inspect(pcap([*talk.open(), talk.up(STREAM[:40]), talk.up(b"", flags=flags)]))
        assert text in entries[-1].fault
    talk = Talk()
    entries, _ = inspect(pcap([*talk.open(), talk.up(STREAM[:40])]))
    assert entries[-1].good
    assert "the capture ends inside it" in entries[-1].notes[0]


def test_damaged_bytes_in_a_stream_end_no_other_stream():
    talk, other = Talk(), Talk(("10.0.0.3", 40000))
    broken = STREAM[:28] + b"\xde\xad\xbe\xef\xde\xad\xbe\xef" + STREAM[28:]
    entries, _ = inspect(pcap([*talk.open(), talk.up(broken), *conversation(other)]))
    assert "no frame starts with the bytes 1b000000deadbeef" in entries[1].fault
    beats = [entry.step for entry in entries if entry.leg == "rank 1 control" and entry.name == "Heartbeat"]
    assert beats[:3] == [1, 2, 3]  # the first one's prefix is before the damage
    assert sum(entry.frame == "control hello" for entry in entries) == 2


# ------------------------------------------------------------------------------------------------------ revision, told


@pytest.mark.parametrize("revision", [r.value for r in Revision])
def test_the_revision_is_found_out(revision):
    codec = ff.Codec(SALT, revision)
    _, found = inspect(codec.encode(ff.EpochAggregated(ff.EpochMetrics(1, {"a": 0.5}))))
    assert found.revision[0].value == revision
    _, found = inspect(BEATS[0], revision="0.7")  # told, it is not found out
    assert found.revision == (Revision.V0_7, "as asked")


def test_what_tells_the_revision():
    _, found = inspect(BEATS[0])
    assert found.revision == (Revision.V0_6, "0.6 and 0.7 look alike so far")
    later = ff.Codec(SALT, "0.8")
    hello = ff.RelayHello("a", [0], [bytes(32)])
    for data, reason in (
        (later.encode(ff.SyncNow()), "control version 4"),
        (later.data_ack(), "data version 3"),
        (later.control_hello(0, 1, bytes(32)), "control version 4"),
        (later.encode_mux(ff.MuxRecord(ff.MuxKind.CONTROL, 0, hello)), "the layout of a RelayHello"),
    ):
        assert inspect(data)[1].revision == (Revision.V0_8, reason)
    half = bytes.fromhex("f1170df10100000000000000000000f03f0101020000000400000000000000803f0040a717aedb13586d3e")
    entries, found = inspect(half)
    assert found.revision == (Revision.V0_7, "0.7 and 0.8 look alike so far")
    assert entries[0].tensors == [("bfloat16", (2,), 4)]
    elided = later.encode_round(ff.RoundFrame([np.zeros((3, 4), "f4")]), elide=True)
    entries, found = inspect(elided)
    assert found.revision == (Revision.V0_8, "the layout of a RoundFrame")
    assert entries[0].tensors == [("float32", (3, 4), 0)]
    sample = ff.Codec(SALT, "0.7").encode(ff.TimingResourceSample(1, ff.ResourceSample(0.5)))
    entries, found = inspect(BEATS[0] + sample)
    assert found.revision == (Revision.V0_7, "the layout of a TimingResourceSample")
    assert entries[1].name == "ResourceSample"


def test_a_frame_that_nobody_vouches_for_tells_nothing():
    codec = ff.Codec(bytes(16), "0.7")
    entries, found = inspect(codec.encode(ff.EpochAggregated(ff.EpochMetrics(1))) + BEATS[0])
    assert entries[0].mac == "BAD"
    assert found.revision[1] == "0.6 and 0.7 look alike so far"


# ------------------------------------------------------------------------------------------------------- real traffic


@pytest.mark.parametrize(
    ("name", "revision", "frames"),
    [("relay-0.6.pcapng", "0.6", None), ("relay-0.7.pcapng", "0.7", None), ("relay-0.8.pcapng", "0.8", None)],
)
def test_the_crate_through_its_relays(name, revision, frames):
    entries, found = inspect((TRAFFIC / name).read_bytes())
    assert found.revision[0].value == revision
    assert all(entry.good for entry in entries)
    assert {entry.mac for entry in entries} <= {"ok", "none"}
    legs = {entry.leg for entry in entries if entry.leg_rank is not None}
    assert legs == {f"rank {n} {what}" for n in range(3) for what in ("control", "data")}
    assert {entry.leg for entry in entries if entry.frame == "mux"} == {
        f"host{n} {what}" for n in range(2) for what in ("control", "data")
    }
    # What a rank sends its relay passes on: once on either leg.
    inner = sorted(str(e.inner.message) for e in entries if e.inner is not None and e.inner.kind == "Timing")
    assert inner == sorted(str(e.message) for e in entries if e.kind == "Timing")
    model = [entry for entry in entries if entry.frame == "round" and entry.kind == "Model"]
    weights = [entry.fields["weight"] for entry in model if entry.direction is Direction.UP]
    assert {entry.fields["weight"] for entry in model if entry.direction is Direction.DOWN} == {sum(weights)}


def test_agents_that_join_and_ranks_that_dial_the_controller():
    entries, found = inspect((TRAFFIC / "join-0.6.pcap").read_bytes())
    assert all(entry.good for entry in entries)
    assert "1 of the connections carry something else than flodl" in found.notes  # the status page
    joins = [entry.name for entry in entries if entry.kind == "Join"]
    assert joins[:2] == ["Hello", "Accept"]
    assert joins.count("WorldFormed") == 2
    assert {"a/0 data", "a/0 control", "b/1 data", "b/1 control"} <= {entry.leg for entry in entries}


def test_a_local_cluster():
    entries, _ = inspect((TRAFFIC / "local-0.6.pcapng").read_bytes())
    assert all(entry.good for entry in entries)
    assert {entry.leg_rank for entry in entries} == {None, 0}  # rank 1 is direct, in records


def test_real_packets_that_are_cut_short():
    entries, found = inspect((TRAFFIC / "cut-0.6.pcap").read_bytes())
    full, _ = inspect((TRAFFIC / "relay-0.6.pcapng").read_bytes())
    assert {entry.frame for entry in entries} == {entry.frame for entry in full}
    assert any("bytes of it are not captured" in note for entry in entries for note in entry.notes)
    assert "bytes are not captured" in found.notes[-1]
    assert all(entry.good for entry in entries)


def test_a_different_salt_and_none():
    data = (TRAFFIC / "relay-0.6.pcapng").read_bytes()
    assert {entry.mac for entry in inspect(data, salt=bytes(16))[0]} == {"BAD", "none"}
    assert {entry.mac for entry in inspect(data, salt=None)[0]} == {"not checked", "none"}


def test_messages_of_every_kind_in_a_stream():
    messages = [m for m in drawn(5, 300) if not isinstance(m, ff.RelayMsg.__args__)]
    stream = b"\xe3\x17\x0d\xf1" + b"".join(map(CODEC.encode, messages))
    talk = Talk()
    packets = [*talk.open(), *(talk.up(stream[at : at + 1400]) for at in range(0, len(stream), 1400))]
    entries, _ = inspect(pcap(packets), revision="0.6")
    assert [entry.message for entry in entries[1:]] == [ff.to_json(message) for message in messages]

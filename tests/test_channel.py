"""Channels against a far end that the test plays byte by byte; asyncio's pass the same tests (docs/wire.md §7)."""

from __future__ import annotations

import gc
import math
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import reference as ref
from channel_support import (
    CHANNEL_MAGIC,
    CODEC,
    HOST,
    RANK,
    SIGNATURES,
    WAIT,
    WAYS,
    WORLD,
    Flavour,
    exactly,
    greeting,
    message_bytes,
    nobody_listens,
    relay,
    round_bytes,
    running,
)
from conftest import REVISIONS, SALT
from round_support import measures_memory
from worker_support import until

import flodl_fast as ff
from flodl_fast import aio, channel, net
from flodl_fast.net import Deadlines

OTHER = bytes(reversed(SALT))
BOTH = pytest.mark.parametrize("way", WAYS)
CHANNELS = pytest.mark.parametrize("what", ["control", "data"])
MODEL, CONTROL = ff.RoundKind.MODEL, ff.RoundKind.CONTROL


@pytest.fixture(params=["blocking", "asyncio"])
def flavour(request):
    made = Flavour(request.param)
    yield made
    made.close()


def arrays(*shapes, start=1.0):
    """Float32 arrays of these shapes, counting on."""
    return [
        np.arange(start + i, start + i + np.prod(shape), dtype=np.float32).reshape(shape)
        for i, shape in enumerate(shapes)
    ]


def equal(got, expected):
    return len(got) == len(expected) and all(
        np.array_equal(a, b) and a.shape == b.shape and a.dtype == b.dtype for a, b in zip(got, expected, strict=True)
    )


# ------------------------------------------------------------------------------------------------------- handshakes


@BOTH
@CHANNELS
def test_hello_and_ack_are_the_oracles(flavour, what, way):
    channel, _ = flavour.connect(what, way)
    assert channel.ranks == (RANK,)
    assert channel.world == WORLD
    assert channel.host == (HOST if way == "direct" else None)
    assert not channel.closed


def test_the_vector_of_the_control_handshake(flavour):
    codec = ff.Codec("00112233445566778899aabbccddeeff")
    near, far = flavour.pair()
    made = running(flavour.ControlChannel.connect, near, codec, 1, 3)
    assert exactly(far, 24).hex() == "c2170df10200000001000000030000001d0a000b5cd6787c"
    far.sendall(bytes.fromhex("c3170df102000000c9f1f132b4906500"))
    flavour.keep(made.result(WAIT))


def acks(what, way):
    """Wrong answers to a hello, by what is wrong."""
    ack = greeting(what, way)[1]
    yield "end", b""
    yield "end inside", ack[:-1]
    yield "magic", b"\0" + ack[1:]
    yield "version", ack[:4] + b"\x09" + ack[5:]
    if what == "control" or way == "direct":
        yield "mac", ack[:8] + bytes([ack[8] ^ 1]) + ack[9:] if way == "relay" else ack[:17] + b"????????" + ack[25:]
    if way == "direct":
        yield "another message", relay({"DeclareDead": {"rank": 0}})
        yield "another record", ref.encode_mux(SALT, {"record": "Broadcast", "payload": "00"})
        yield "a huge record", ack[:13] + (ff.Codec(SALT).max_payload + 1).to_bytes(4, "little") + ack[17:]


@pytest.mark.parametrize(
    ("what", "way", "answer"),
    [
        pytest.param(what, way, answer, id=f"{what}-{way}-{wrong}")
        for what in ("control", "data")
        for way in WAYS
        for wrong, answer in acks(what, way)
    ],
)
def test_wrong_acks_are_refused(flavour, what, way, answer):
    near, far = flavour.pair()
    connect = {"control": flavour.ControlChannel, "data": flavour.DataChannel}[what].connect
    made = running(connect, near, CODEC, RANK, WORLD, host=HOST if way == "direct" else None)
    hello = greeting(what, way)[0]
    assert exactly(far, len(hello)) == hello
    far.sendall(answer)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ff.HandshakeError, match="the handshake failed: "):
        made.result(WAIT)
    assert exactly(far, 1) == b""  # The socket was closed.


@BOTH
@CHANNELS
def test_a_silent_peer_ends_the_handshake(flavour, what, way):
    near, _ = flavour.pair()
    connect = {"control": flavour.ControlChannel, "data": flavour.DataChannel}[what].connect
    with pytest.raises(ff.HandshakeError, match=r"nothing for 0\.1 s"):
        connect(near, CODEC, RANK, WORLD, host=HOST if way == "direct" else None, deadlines=Deadlines(handshake=0.1))


@pytest.mark.parametrize("rank", [-1, WORLD])
def test_a_rank_outside_the_world_is_refused(flavour, rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 3"):
        flavour.ControlChannel.connect(("127.0.0.1", 9), CODEC, rank, WORLD)


def test_dialling_goes_on_until_somebody_answers(flavour):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # Nobody listens yet, and nobody else can.
        deadlines = Deadlines(attempts=10**6, pause=0.01)
        made = running(flavour.DataChannel.connect, listener.getsockname(), CODEC, RANK, WORLD, deadlines=deadlines)
        time.sleep(0.05)
        listener.listen()
        far, _ = listener.accept()
    with far:
        assert exactly(far, 16) == ref.data_hello(RANK, WORLD)
        far.sendall(ref.data_ack())
        channel = flavour.keep(made.result(WAIT))
        with socket.socket(fileno=channel.fileno()) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            same.detach()
        channel.close()
        assert channel.fileno() == -1


def test_dialling_ends_after_its_attempts(flavour):
    with nobody_listens() as address, pytest.raises(ff.HandshakeError) as caught:
        flavour.JoinChannel.connect(address, CODEC, deadlines=Deadlines(attempts=3, pause=0.001))
    assert f"127.0.0.1:{address[1]} did not answer in 3 attempts" in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:7000", ("127.0.0.1",), 7000, None])
def test_what_is_no_address_is_not_dialled(flavour, address):
    words = re.escape(f"(host, port) pair or a socket to connect to, got {address!r}")
    with pytest.raises(TypeError, match=words):
        flavour.JoinChannel.connect(address, CODEC)


@pytest.mark.parametrize("ranks", [(0,), (0, 2), (0, 1, 2)])
@CHANNELS
def test_relays_are_served(flavour, what, ranks):
    channel, _ = flavour.serve(what, "direct", ranks)
    assert (channel.ranks, channel.world, channel.host) == (ranks, WORLD, HOST)


@CHANNELS
def test_ranks_that_take_the_port_for_their_relays_are_served(flavour, what):
    channel, _ = flavour.serve(what, "relay", (2,))
    assert (channel.ranks, channel.world, channel.host) == ((2,), WORLD, None)


def test_join_agents_are_served(flavour):
    near, far = flavour.pair()
    made = running(flavour.accept, near, CODEC, WORLD)
    far.sendall(CHANNEL_MAGIC["join"].to_bytes(4, "little") + CODEC.encode(ff.JoinAbort("no")))
    channel = flavour.keep(made.result(WAIT))
    assert channel.ranks == ()
    assert channel.recv(WAIT) == ff.JoinAbort("no")


GREETINGS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "rendezvous": bytes.fromhex("e0170df1"),
    "a control hello of another world": ref.control_hello(SALT, 1, 4),
    "a data hello of another world": ref.data_hello(1, 4),
    "a control hello of no rank": ref.control_hello(SALT, 3, 3),
    "a data hello of no rank": ref.data_hello(3, 3),
    "a control hello with another salt": ref.control_hello(OTHER, 1, 3),
    "half a hello": ref.control_hello(SALT, 1, 3)[:20],
    "half a magic": ref.control_hello(SALT, 1, 3)[:3],
    "nothing": b"",
    "a relay hello with another salt": greeting("data", "direct")[0][:4]
    + ref.encode_mux(OTHER, {"record": "Control", "msg": {"Hello": {"host": "h", "ranks": [1]}}}),
    "another message than a relay hello": greeting("data", "direct")[0][:4] + relay("HelloAck"),
    **{
        f"a relay of ranks {ranks}": greeting("control", "direct", ranks)[0]
        for ranks in ((), (3,), (1, 1), (2, 1), (0, 3))
    },
}


@pytest.mark.parametrize("hello", GREETINGS.values(), ids=GREETINGS)
def test_other_greetings_are_refused(flavour, hello):
    near, far = flavour.pair()
    made = running(flavour.accept, near, CODEC, WORLD)
    far.sendall(hello)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ff.HandshakeError, match="the handshake failed: "):
        made.result(WAIT)
    assert exactly(far, 1) == b""


@pytest.mark.parametrize(
    ("hello", "deadlines"), [(b"", {"first_bytes": 0.1}), (b"\xc2\x17\x0d\xf1", {"handshake": 0.1})]
)
def test_a_silent_dialler_is_refused(flavour, hello, deadlines):
    near, far = flavour.pair()
    far.sendall(hello)
    with pytest.raises(ff.HandshakeError, match=r"nothing for 0\.1 s"):
        flavour.accept(near, CODEC, WORLD, deadlines=Deadlines(**deadlines))


# --------------------------------------------------------------------------------------------------------- messages

PLAN = ff.StartEpoch(ff.EpochPlan(1, 2, 300))


@BOTH
def test_messages_cross_as_the_oracle_frames_them(flavour, way):
    channel, far = flavour.connect("control", way)
    channel.send(ff.Heartbeat(RANK, 7))
    expected = message_bytes(way, ff.Heartbeat(RANK, 7))
    assert exactly(far, len(expected)) == expected
    far.sendall(message_bytes(way, PLAN) + message_bytes(way, ff.Shutdown()))
    assert channel.recv() == PLAN
    assert channel.recv(0) == ff.Shutdown()


@BOTH
def test_served_messages_cross(flavour, way):
    channel, far = flavour.serve("control", way)
    channel.send(PLAN)
    expected = message_bytes(way, PLAN)
    assert exactly(far, len(expected)) == expected
    far.sendall(message_bytes(way, ff.Exiting(RANK)))
    assert channel.recv(WAIT) == ff.Exiting(RANK)


def test_a_served_host_of_several_ranks(flavour):
    channel, far = flavour.serve("control", "direct", (0, 2))
    channel.send(PLAN, rank=2)
    expected = message_bytes("direct", PLAN, rank=2)
    assert exactly(far, len(expected)) == expected
    for rank in (None, 1):
        with pytest.raises(ValueError, match=rf"rank {rank} is not one of \[0, 2\]"):
            channel.send(PLAN, rank=rank)
    # The payload says whose it is, whatever the record's tag.
    far.sendall(message_bytes("direct", ff.Exiting(0), rank=2) + relay({"RankExit": {"rank": 2}}))
    assert channel.recv(WAIT) == ff.Exiting(0)
    assert channel.recv(WAIT) == ff.RelayRankExit(2)


def test_records_for_others_are_passed_over(flavour):
    channel, far = flavour.connect("control", "direct")
    far.sendall(
        message_bytes("direct", ff.Throttle(), rank=2)
        + relay("HelloAck")
        + relay({"DeclareDead": {"rank": RANK}})
        + message_bytes("direct", PLAN)
    )
    assert channel.recv(WAIT) == PLAN


@pytest.mark.parametrize("record", ["HostFrame", "Broadcast"])
def test_records_of_the_data_channel_have_no_place(flavour, record):
    channel, far = flavour.connect("control", "direct")
    far.sendall(ref.encode_mux(SALT, {"record": record, "payload": "00"}))
    with pytest.raises(ff.ChannelError, match="has no place on a control channel"):
        channel.recv(WAIT)
    assert channel.closed


@BOTH
def test_messages_that_cannot_be_leave_the_channel_as_it_is(flavour, way):
    channel, far = flavour.connect("control", way)
    with pytest.raises(ff.EncodeError):
        channel.send(ff.Heartbeat(-1, 0))
    with pytest.raises(TypeError):
        channel.send("Heartbeat")
    channel.send(ff.Heartbeat(1, 1))
    expected = message_bytes(way, ff.Heartbeat(1, 1))
    assert exactly(far, len(expected)) == expected


@BOTH
def test_a_message_in_pieces_survives_every_timeout(flavour, way):
    channel, far = flavour.connect("control", way)
    data = message_bytes(way, PLAN)
    for cut in range(1, len(data), 7):
        far.sendall(data[:cut])
        for timeout in (0, 0.001):
            with pytest.raises(TimeoutError):
                channel.recv(timeout)
        far.sendall(data[cut:])
        assert channel.recv(WAIT) == PLAN


@BOTH
@pytest.mark.parametrize("wait", [math.inf, 1e12])
def test_a_wait_may_be_as_long_as_you_like(flavour, way, wait):
    channel, far = flavour.connect("control", way)
    coming = running(channel.recv, wait, liveness=wait)
    far.sendall(message_bytes(way, ff.Shutdown()))
    assert coming.result(WAIT) == ff.Shutdown()


@BOTH
def test_bytes_one_by_one(flavour, way):
    channel, far = flavour.connect("control", way)
    got = running(channel.recv, WAIT)
    for byte in message_bytes(way, PLAN):
        far.send(bytes([byte]))
        time.sleep(0.0005)
    assert got.result(WAIT) == PLAN


@BOTH
def test_an_end_at_every_byte_of_a_frame(flavour, way):
    data = message_bytes(way, PLAN)
    for cut in range(len(data)):
        channel, far = flavour.connect("control", way)
        far.sendall(message_bytes(way, ff.Throttle()) + data[:cut])
        far.close()
        assert channel.recv(WAIT) == ff.Throttle()
        with pytest.raises(ff.ChannelError) as caught:
            channel.recv(WAIT)
        if cut:
            assert not isinstance(caught.value, ff.ChannelClosed)
            assert f"{cut} bytes into a frame" in str(caught.value)
            assert isinstance(caught.value.__cause__, ff.TruncatedError)
        else:
            assert type(caught.value) is ff.ChannelClosed
        with pytest.raises(ff.ChannelClosed, match="the channel is closed: the peer has closed the channel"):
            channel.recv(0)
        channel.close()


def test_a_connection_that_is_reset(flavour):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = running(flavour.ControlChannel.connect, listener.getsockname(), CODEC, RANK, WORLD)
        far, _ = listener.accept()
    far.sendall(ref.control_ack(SALT))
    channel = flavour.keep(made.result(WAIT))
    pending = running(channel.recv)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    with pytest.raises(ff.ChannelClosed):
        pending.result(WAIT)
    assert channel.closed


@BOTH
def test_a_flipped_bit_in_every_byte_of_a_frame(flavour, way):
    data = message_bytes(way, PLAN)
    for at in range(len(data)):
        channel, far = flavour.connect("control", way)
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        far.sendall(bad)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises((ff.DecodeError, ff.ChannelError)):
            channel.recv(WAIT)
        assert channel.closed
        with pytest.raises(ff.ChannelClosed, match="the channel is closed: "):
            channel.send(ff.Exiting(RANK))
        assert exactly(far, 1) == b""  # The far end learns of it.
        channel.close()


@BOTH
def test_a_silent_peer_inside_a_frame(flavour, way):
    """Case 19: 12 bytes of a header, and the socket stays open."""
    channel, far = flavour.connect("control", way)
    far.sendall(message_bytes(way, PLAN)[:12])
    with pytest.raises(TimeoutError):
        channel.recv(1)
    pending = running(channel.recv)
    time.sleep(0.05)
    assert not pending.done()
    channel.close()
    with pytest.raises(ff.ChannelClosed, match="this side has closed it"):
        pending.result(WAIT)
    channel.close()


@BOTH
def test_a_frame_that_stands_still(flavour, way):
    channel, far = flavour.connect("control", way, starvation=0.1)
    with pytest.raises(TimeoutError):  # No frame has begun.
        channel.recv(0.2)
    far.sendall(message_bytes(way, PLAN)[:12])
    with pytest.raises(ff.ChannelError, match=r"nothing for 0\.1 s, 12 bytes into a frame"):
        channel.recv(WAIT)
    assert channel.closed


@BOTH
def test_liveness_counts_across_calls(flavour, way):
    channel, far = flavour.connect("control", way)
    far.sendall(message_bytes(way, PLAN))
    time.sleep(0.06)
    assert channel.recv(0, liveness=0.05) == PLAN  # What is there counts, however late it is looked at.
    with pytest.raises(TimeoutError):
        channel.recv(0.01, liveness=WAIT)
    with pytest.raises(ff.ChannelError, match=r"no message for 0\.1 s"):
        channel.recv(WAIT, liveness=0.1)
    assert channel.closed


def test_liveness_counts_from_the_last_message(flavour, monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(net, "time", clock)
    channel, far = flavour.connect("control", "relay")
    for clock.now in (108.0, 116.0):
        got = running(channel.recv, liveness=10)
        time.sleep(0.05)
        assert not got.done()
        far.sendall(message_bytes("relay", PLAN))
        assert got.result(WAIT) == PLAN
    clock.now = 126.0
    with pytest.raises(ff.ChannelError, match="no message for 10 s"):
        channel.recv(liveness=10)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals that interrupt")
@BOTH
def test_what_a_signal_handler_raises_inside_a_frame_closes(way):
    """TimeoutError is what such handlers like to raise; it is no wait of ours."""

    def ring(*_):
        raise TimeoutError("the alarm")

    flavour = Flavour("blocking")
    channel, far = flavour.connect("control", way)
    before = signal.signal(signal.SIGALRM, ring)

    def alarm():
        exactly(far, 1)  # A frame has begun, and is larger than what fits between the two ends.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    try:
        running(alarm)
        with pytest.raises(TimeoutError, match="the alarm"):
            channel.send(ff.DashboardSetMetadata(RANK, "x" * (8 << 20)))
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ff.ChannelClosed, match="a call was interrupted"):
        channel.send(ff.Exiting(RANK))
    flavour.close()


@BOTH
def test_many_senders_never_interleave(flavour, way):
    """Case 15, from threads: two senders and a slow reader."""
    channel, far = flavour.connect("control", way)
    messages = [ff.DashboardSetMetadata(RANK, str(i) * (1 << 18)) for i in range(4)]
    done = [running(lambda mine: [channel.send(m) for m in mine], messages[i::2] * 20) for i in range(2)]
    reader = ff.FrameReader(CODEC, "control" if way == "relay" else "mux", prefixed=way == "relay")
    counts = dict.fromkeys("0123", 0)
    for _ in range(80):
        while (item := reader.next()) is None:
            chunk = far.recv(1 << 15)
            assert chunk
            reader.feed(chunk)
        message = item if way == "relay" else CODEC.decode(item.payload)
        assert len(message.json) == 1 << 18
        counts[message.json[0]] += 1
    assert counts == dict.fromkeys("0123", 20)
    for sender in done:
        sender.result(WAIT)


@BOTH
def test_a_reader_that_stands_still_ends_a_send(flavour, way):
    channel, _ = flavour.connect("control", way, write_stall=0.2)
    with pytest.raises(ff.ChannelError, match=r"taken nothing for 0\.2 s"):
        channel.send(ff.DashboardSetMetadata(RANK, "x" * (8 << 20)))
    assert channel.closed


@BOTH
def test_a_slow_reader_does_not(flavour, way):
    channel, far = flavour.connect("control", way, write_stall=2.0)
    message = ff.DashboardSetMetadata(RANK, "x" * (4 << 20))
    sent = running(channel.send, message)
    expected = message_bytes(way, message)
    got = bytearray()
    while len(got) < len(expected):
        chunk = far.recv(1 << 19)
        assert chunk
        got += chunk
        time.sleep(0.12)
    assert got == expected
    sent.result(WAIT)


@BOTH
def test_a_send_ends_when_the_system_has_all_of_it(flavour, way):
    channel, far = flavour.connect("control", way)
    with socket.socket(fileno=channel.fileno()) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        same.detach()
    message = ff.DashboardSetMetadata(RANK, "x" * 50_000)
    sent = running(channel.send, message)
    time.sleep(0.05)
    assert not sent.done()
    expected = message_bytes(way, message)
    reading = running(exactly, far, len(expected))
    sent.result(WAIT)
    channel.close()
    assert reading.result(WAIT) == expected


@BOTH
def test_a_peer_that_has_only_stopped_sending_still_gets_messages(flavour, way):
    channel, far = flavour.connect("control", way)
    far.shutdown(socket.SHUT_WR)
    time.sleep(0.05)
    channel.send(ff.Exiting(RANK))
    expected = message_bytes(way, ff.Exiting(RANK))
    assert exactly(far, len(expected)) == expected
    with pytest.raises(ff.ChannelClosed, match="the peer has closed the channel"):
        channel.recv(WAIT)


@BOTH
def test_close_ends_a_send_that_waits(flavour, way):
    channel, _ = flavour.connect("control", way)
    pending = [running(channel.send, ff.DashboardSetMetadata(RANK, "x" * (8 << 20))) for _ in range(2)]
    time.sleep(0.1)
    channel.close()
    for sender in pending:
        with pytest.raises(ff.ChannelClosed, match="this side has closed it"):
            sender.result(WAIT)


@BOTH
def test_a_peer_that_has_gone_ends_a_send(flavour, way):
    channel, far = flavour.connect("control", way)
    far.close()
    with pytest.raises(ff.ChannelClosed, match="the peer has closed the channel"):
        channel.send(ff.DashboardSetMetadata(RANK, "x" * (8 << 20)))
    assert channel.closed


def test_a_payload_above_the_limit_is_refused_from_its_header(flavour):
    """Case 16."""
    header = bytes.fromhex("c4170df10200000000000000000000000100000001000001")
    channel, far = flavour.connect("control", "relay")
    far.sendall(len(header).to_bytes(4, "little") + header)
    with pytest.raises(ff.LimitError, match=r"16777217 .*16777216.*max_payload"):
        channel.recv(WAIT)
    assert channel.closed


def test_join_messages_are_bare_and_can_be_rekeyed(flavour):
    open_codec = ff.Codec(bytes(16))
    near, far = flavour.pair()
    channel = flavour.keep(flavour.JoinChannel.connect(near, open_codec))
    channel.send(ff.JoinHello("north", b"\0", ["cpu"], "2.0", bytes(32)))
    hello = CHANNEL_MAGIC["join"].to_bytes(4, "little") + open_codec.encode(
        ff.JoinHello("north", b"\0", ["cpu"], "2.0", bytes(32))
    )
    assert exactly(far, len(hello)) == hello
    accept = ff.JoinAccept([0], SALT.hex(), 60)
    formed = CODEC.encode(ff.JoinWorldFormed("00", None))
    far.sendall(open_codec.encode(accept) + formed[:30])  # The next frame, under its salt, is on its way already.
    assert channel.recv(WAIT) == accept
    channel.rekey(CODEC)
    assert channel.codec is CODEC
    far.sendall(formed[30:])
    assert channel.recv(WAIT) == ff.JoinWorldFormed("00", None)
    channel.send(ff.JoinRankExited(0, -1))
    expected = CODEC.encode(ff.JoinRankExited(0, -1))
    assert exactly(far, len(expected)) == expected


# ----------------------------------------------------------------------------------------------------------- rounds


def served(far, way, tensors, kind=MODEL, weight=2.0, reply=None):
    """Play the controller for one round in a thread: check the request, and answer it."""

    def serve():
        expected = round_bytes(way, ff.RoundFrame(tensors, kind, weight), "HostFrame")
        assert exactly(far, len(expected)) == expected
        if reply is not None:
            far.sendall(reply)

    return running(serve)


@BOTH
def test_rounds_cross_as_the_oracle_frames_them(flavour, way):
    channel, far = flavour.connect("data", way)
    for shapes in ([(2, 3), (), (0, 4)], [(3,)], [(2, 3), (), (0, 4)], [(5,)], [], [(4, 2), (1,), (7,)]):
        mine, others = arrays(*shapes), arrays(*shapes, start=100.0)
        controller = served(far, way, mine, reply=round_bytes(way, ff.RoundFrame(others, MODEL, 6.0)))
        frame = channel.all_reduce(mine, MODEL, 2.0)
        controller.result(WAIT)
        assert equal(frame.tensors, others)
        assert (frame.kind, frame.weight, frame.realized) == (MODEL, 6.0, True)
        assert equal(mine, arrays(*shapes))


def test_layouts_are_kept_between_rounds(flavour, monkeypatch):
    channel, far = flavour.connect("data", "relay")
    made = []
    of = ff.TensorLayout.of
    layouts = SimpleNamespace(of=lambda arrays, wire: made.append(len(arrays)) or of(arrays, wire=wire))
    monkeypatch.setattr(net, "TensorLayout", layouts)
    for shapes in 3 * ([(3,)], [(2, 3), (4,)]):  # As counts and parameters alternate.
        mine = arrays(*shapes)
        controller = served(far, "relay", mine, reply=round_bytes("relay", ff.RoundFrame(mine, MODEL, 3.0)))
        channel.all_reduce(mine, MODEL, 2.0)
        controller.result(WAIT)
    assert made == [1, 2]


@BOTH
def test_results_go_into_the_callers_arrays(flavour, way):
    channel, far = flavour.connect("data", way)
    others = arrays((2, 3), (4,), start=100.0)
    reply = round_bytes(way, ff.RoundFrame(others, CONTROL, 0.0))
    mine = arrays((2, 3), (4,))
    controller = served(far, way, mine, CONTROL, 0.0, reply)
    frame = channel.all_reduce(mine, CONTROL, 0.0, out=mine)
    controller.result(WAIT)
    assert equal(mine, others)
    assert all(a is b for a, b in zip(frame.tensors, mine, strict=True))

    targets = [np.zeros((3, 2), np.float32).T, np.zeros((4, 2), ">f4")[:, 0]]  # of any strides and byte order
    mine = arrays((2, 3), (4,))
    controller = served(far, way, mine, CONTROL, 0.0, reply)
    channel.all_reduce(iter(mine), CONTROL, 0.0, out=iter(targets))
    controller.result(WAIT)
    assert np.array_equal(targets[0], others[0])
    assert np.array_equal(targets[1], others[1])
    assert equal(mine, arrays((2, 3), (4,)))


REPLIES = {
    "another shape": (arrays((3, 2), (4,)), MODEL, r"tensor 0: .*\(3, 2\).*\(2, 3\)"),
    "another size": (arrays((2, 3), (5000,)), MODEL, r"tensor 1: .*\(5000,\).*\(4,\)"),
    "fewer tensors": (arrays((2, 3)), MODEL, "frame has 1 tensors, the layout 2"),
    "another kind": (arrays((2, 3), (4,)), CONTROL, "a MODEL round was asked for, the reply is CONTROL"),
}


@BOTH
@pytest.mark.parametrize(("tensors", "kind", "says"), REPLIES.values(), ids=REPLIES)
def test_a_reply_that_does_not_match(flavour, way, tensors, kind, says):
    channel, far = flavour.connect("data", way)
    mine, out = arrays((2, 3), (4,)), arrays((2, 3), (4,), start=50.0)
    controller = served(far, way, mine, reply=round_bytes(way, ff.RoundFrame(tensors, kind, 3.0)))
    with pytest.raises(ff.TensorError, match=says):
        channel.all_reduce(mine, MODEL, 2.0, out=out)
    controller.result(WAIT)
    assert equal(out, arrays((2, 3), (4,), start=50.0))
    # The stream is in step: the next round works.
    controller = served(far, way, mine, reply=round_bytes(way, ff.RoundFrame(mine, MODEL, 3.0)))
    channel.all_reduce(mine, MODEL, 2.0, out=out)
    controller.result(WAIT)
    assert equal(out, mine)


@BOTH
def test_a_flipped_bit_in_every_byte_of_a_reply(flavour, way):
    mine = arrays((2,), ())
    good = round_bytes(way, ff.RoundFrame(arrays((2,), (), start=9.0), MODEL, 3.0))
    for at in range(len(good)):
        channel, far = flavour.connect("data", way)
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        controller = served(far, way, mine, reply=bytes(bad))
        out = arrays((2,), (), start=50.0)
        result = running(channel.all_reduce, mine, MODEL, 2.0, out)
        controller.result(WAIT)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises((ff.DecodeError, ff.ChannelError)) as caught:
            result.result(WAIT)
        assert equal(out, arrays((2,), (), start=50.0))
        assert channel.closed != isinstance(caught.value, ff.TensorError)
        channel.close()


@BOTH
def test_an_end_at_every_byte_of_a_reply(flavour, way):
    mine = arrays((2,), ())
    good = round_bytes(way, ff.RoundFrame(arrays((2,), (), start=9.0), MODEL, 3.0))
    for cut in range(len(good)):
        channel, far = flavour.connect("data", way)
        controller = served(far, way, mine, reply=good[:cut])
        out = arrays((2,), (), start=50.0)
        result = running(channel.all_reduce, mine, MODEL, 2.0, out)
        controller.result(WAIT)
        far.close()
        with pytest.raises(ff.ChannelError) as caught:
            result.result(WAIT)
        assert isinstance(caught.value, ff.ChannelClosed) == (cut == 0)
        assert equal(out, arrays((2,), (), start=50.0))
        with pytest.raises(ff.ChannelClosed, match="the channel is closed: "):
            channel.gather(1.0)
        channel.close()


@BOTH
def test_an_unrealized_reply_leaves_out_as_it_was(flavour, way):
    channel, far = flavour.connect("data", way)
    mine = arrays((2, 3))
    reply = round_bytes(way, ff.RoundFrame([np.zeros((2, 3), np.float32)], MODEL, 0.0))
    controller = served(far, way, mine, weight=0.0, reply=reply)
    frame = channel.all_reduce(mine, MODEL, 0.0, out=mine)
    controller.result(WAIT)
    assert not frame.realized
    assert equal(mine, arrays((2, 3)))
    # What does not match is refused whatever its weight.
    other = round_bytes(way, ff.RoundFrame(arrays((3, 2)), MODEL, 0.0))
    controller = served(far, way, mine, weight=0.0, reply=other)
    with pytest.raises(ff.TensorError, match=r"tensor 0: .*\(3, 2\).*\(2, 3\)"):
        channel.all_reduce(mine, MODEL, 0.0, out=mine)
    controller.result(WAIT)
    # Nothing is believed without its MAC, a weight of 0 neither.
    forged = bytearray(reply)
    forged[-1] ^= 1
    controller = served(far, way, mine, weight=0.0, reply=bytes(forged))
    with pytest.raises(ff.AuthenticationError):
        channel.all_reduce(mine, MODEL, 0.0, out=mine)
    controller.result(WAIT)


@BOTH
def test_a_channel_keeps_none_of_the_arrays_of_a_round(flavour, way):
    channel, far = flavour.connect("data", way)
    for reply in (ff.RoundFrame(arrays((2, 3)), MODEL, 1.0), ff.RoundFrame(arrays((3, 2)), MODEL, 1.0)):
        mine = arrays((2, 3))
        kept = weakref.ref(mine[0])
        controller = served(far, way, arrays((2, 3)), reply=round_bytes(way, reply))
        with suppress(ff.TensorError):
            channel.all_reduce(mine, MODEL, 2.0)
        controller.result(WAIT)
        del mine
        gc.collect()
        assert kept() is None


@BOTH
def test_a_served_channel_keeps_none_of_the_arrays_of_a_frame(flavour, way):
    channel, far = flavour.serve("data", way)
    frame = ff.RoundFrame(arrays((2, 3)), MODEL, 1.0)
    kept = weakref.ref(frame.tensors[0])
    channel.send(frame)
    assert exactly(far, len(round_bytes(way, frame))) == round_bytes(way, frame)
    del frame
    gc.collect()
    assert kept() is None


def frozen(array):
    array.flags.writeable = False
    return array


BAD_CALLS = {
    "no float32": ([np.zeros(3)], 1.0, None, TypeError, "float64"),
    "weight": (arrays((2,)), -1.0, None, ff.EncodeError, "weight"),
    "read-only out": (arrays((2,)), 1.0, [frozen(np.zeros(2, np.float32))], ValueError, "tensor 0: out is read-only"),
    "out of another shape": (arrays((2, 3)), 1.0, arrays((3, 2)), ff.TensorError, r"tensor 0: .*\(2, 3\).*\(3, 2\)"),
    "out of another count": (arrays((2,)), 1.0, [], ff.TensorError, "1 tensors to reduce, out has 0"),
    "out of another dtype": (arrays((2,)), 1.0, [np.zeros(2)], TypeError, "float64"),
    "out too narrow": (
        arrays((2,)), 1.0, [np.zeros(2, net.BFLOAT16)], ff.TensorError, "tensor 0: expected float32, out has bfloat16",
    ),
}


@BOTH
@pytest.mark.parametrize(("mine", "weight", "out", "error", "says"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_what_cannot_be_sent_is_not(flavour, way, mine, weight, out, error, says):
    channel, far = flavour.connect("data", way)
    with pytest.raises(error, match=says):
        channel.all_reduce(mine, MODEL, weight, out)
    mine = arrays((2,))
    controller = served(far, way, mine, reply=round_bytes(way, ff.RoundFrame(mine, MODEL, 3.0)))
    assert channel.all_reduce(mine, MODEL, 2.0).weight == 3.0
    controller.result(WAIT)


@BOTH
def test_a_frame_above_the_ceiling_is_not_sent(flavour, way):
    near, far = flavour.pair()
    codec = ff.Codec(SALT, frame_ceiling=1000)
    made = running(flavour.DataChannel.connect, near, codec, RANK, WORLD, host=HOST if way == "direct" else None)
    hello, ack = greeting("data", way)
    exactly(far, len(hello))
    far.sendall(ack)
    channel = flavour.keep(made.result(WAIT))
    with pytest.raises(ff.EncodeError, match=r"1000 \(frame_ceiling\)"):
        channel.all_reduce([np.zeros(245, np.float32)], MODEL, 1.0)
    # Nor is one taken, from its first bytes.
    mine = arrays((2,))
    size = (1001).to_bytes(4, "little")
    reply = size if way == "relay" else relay("HelloAck")[:13] + size + bytes(8)
    controller = served(far, way, mine, reply=reply)
    with pytest.raises(ff.LimitError, match=r"1001 .*1000 \(frame_ceiling\)"):
        channel.all_reduce(mine, MODEL, 2.0)
    controller.result(WAIT)
    assert channel.closed


@BOTH
def test_a_controller_that_does_not_reply(flavour, way):
    channel, far = flavour.connect("data", way, reply=0.1)
    mine = arrays((2,))
    controller = served(far, way, mine)
    with pytest.raises(ff.ChannelError, match=r"nothing for 0\.1 s"):
        channel.all_reduce(mine, MODEL, 2.0, out=mine)
    controller.result(WAIT)
    assert equal(mine, arrays((2,)))
    assert channel.closed


@BOTH
def test_a_result_may_be_a_view_of_the_channel_s_memory(flavour, way):
    channel, far = flavour.connect("data", way)
    mine = arrays((2, 3), ())
    for start in (9.0, 70.0):
        reply = round_bytes(way, ff.RoundFrame(arrays((2, 3), (), start=start), MODEL, 3.0))
        controller = served(far, way, mine, reply=reply)
        frame = channel.all_reduce(mine, MODEL, 2.0, view=True)
        controller.result(WAIT)
        assert frame.weight == 3.0
        assert equal(frame.tensors, arrays((2, 3), (), start=start))
        assert not any(tensor.flags.writeable for tensor in frame.tensors)
    assert equal(mine, arrays((2, 3), ()))


@BOTH
@pytest.mark.parametrize(("shapes", "text"), [
    (((3, 2), ()), r"tensor 0: the reply has shape \(3, 2\), the request had \(2, 3\)"),
    (((2, 3),), "the reply has 1 tensors, the request had 2"),
])
def test_a_view_of_other_shapes_is_refused(flavour, way, shapes, text):
    channel, far = flavour.connect("data", way)
    mine = arrays((2, 3), ())
    controller = served(far, way, mine, reply=round_bytes(way, ff.RoundFrame(arrays(*shapes), MODEL, 3.0)))
    with pytest.raises(ff.TensorError, match=text):
        channel.all_reduce(mine, MODEL, 2.0, view=True)
    controller.result(WAIT)
    assert not channel.closed
    with pytest.raises(ValueError, match="contradict"):
        channel.all_reduce(mine, MODEL, 2.0, out=mine, view=True)


@BOTH
def test_a_reply_in_pieces_may_take_longer_than_one_wait(flavour, way, monkeypatch):
    """Each piece has the whole of it again; what passes meanwhile is kept from the clock."""
    waits = waited_for(monkeypatch)
    channel, far = flavour.connect("data", way, reply=0.5)
    mine = arrays((2,))
    controller = served(far, way, mine)
    result = running(channel.all_reduce, mine, MODEL, 2.0)
    controller.result(WAIT)
    reply = round_bytes(way, ff.RoundFrame(mine, MODEL, 3.0))
    pieces = range(0, len(reply), 12)
    for number, at in enumerate(pieces, 1):
        until(lambda number=number: waits.count(0.5) == number)
        far.sendall(reply[at : at + 12])
    assert result.result(WAIT).weight == 3.0
    assert waits.count(0.5) == len(pieces) > 1


def waited_for(monkeypatch):
    """The seconds that channels would wait, one for each wait; all of them wait for as long as it takes."""
    waits = []

    def endless(wait):
        def waiting(*args):
            waits.append(args[-1])
            return wait(*args[:-1], None)

        return waiting

    monkeypatch.setattr(channel._Link, "_ready", endless(channel._Link._ready))
    monkeypatch.setattr(aio, "_waiter", endless(aio._waiter))
    return waits


@BOTH
def test_close_ends_a_round_that_waits(flavour, way):
    channel, far = flavour.connect("data", way)
    mine = arrays((2,))
    controller = served(far, way, mine)
    pending = [running(channel.all_reduce, mine, MODEL, 2.0, mine) for _ in range(2)]
    controller.result(WAIT)
    channel.close()
    for round_ in pending:
        with pytest.raises(ff.ChannelClosed, match="this side has closed it"):
            round_.result(WAIT)
    assert equal(mine, arrays((2,)))


def test_a_rank_that_was_declared_dead_learns_of_it(flavour):
    channel, far = flavour.connect("data", "direct")
    mine = arrays((2,))
    others = relay({"DeclareDead": {"rank": 0}}) + relay("HelloAck")
    reply = round_bytes("direct", ff.RoundFrame(mine, MODEL, 3.0))
    controller = served(far, "direct", mine, reply=others + reply)
    assert channel.all_reduce(mine, MODEL, 2.0).weight == 3.0  # Another rank's death is not this rank's matter.
    controller.result(WAIT)
    controller = served(far, "direct", mine, reply=relay({"DeclareDead": {"rank": RANK}}))
    with pytest.raises(ff.ChannelError, match="declared rank 1 dead"):
        channel.all_reduce(mine, MODEL, 2.0)
    controller.result(WAIT)
    assert channel.closed


@pytest.mark.parametrize("record", ["HostFrame", "Data"])
def test_records_that_no_controller_sends(flavour, record):
    channel, far = flavour.connect("data", "direct")
    mine = arrays((2,))
    controller = served(far, "direct", mine, reply=ref.encode_mux(SALT, {"record": record, "payload": "00"}))
    with pytest.raises(ff.ChannelError, match="has no place on this data channel"):
        channel.all_reduce(mine, MODEL, 2.0)
    controller.result(WAIT)
    assert channel.closed


def test_a_record_of_no_kind(flavour):
    channel, far = flavour.connect("data", "direct")
    mine = arrays((2,))
    signed = relay("HelloAck")[:8] + bytes([9]) + bytes(8)  # an authentic header of kind 9, without a payload
    controller = served(far, "direct", mine, reply=signed + ref.mac8(SALT, signed))
    with pytest.raises(ff.UnknownKindError, match="mux record kind 9"):
        channel.all_reduce(mine, MODEL, 2.0)
    controller.result(WAIT)
    assert channel.closed


@pytest.mark.parametrize("root", [0, RANK])
@BOTH
def test_broadcast_sends_the_roots_values_and_zeros_else(flavour, way, root):
    channel, far = flavour.connect("data", way)
    mine, values = arrays((2, 3), ()), arrays((2, 3), (), start=9.0)
    sends = mine if root == RANK else [np.zeros((2, 3), np.float32), np.zeros((), np.float32)]
    controller = served(far, way, sends, CONTROL, 0.0, round_bytes(way, ff.RoundFrame(values, CONTROL, 0.0)))
    channel.broadcast(mine, root, out=mine)
    controller.result(WAIT)
    assert equal(mine, values)
    with pytest.raises(ValueError, match="root 3 is not in a world of 3"):
        channel.broadcast(mine, 3)


@BOTH
def test_gather_fills_this_ranks_slot(flavour, way):
    channel, far = flavour.connect("data", way)
    reply = round_bytes(way, ff.RoundFrame([np.array([4, 5, 6], np.float32)], CONTROL, 0.0))
    controller = served(far, way, [np.array([0, 5, 0], np.float32)], CONTROL, 0.0, reply)
    assert channel.gather(5).tolist() == [4.0, 5.0, 6.0]
    controller.result(WAIT)


@BOTH
def test_served_rounds(flavour, way):
    channel, far = flavour.serve("data", way)
    with pytest.raises(TimeoutError):
        channel.recv(0.01)
    mine, others = arrays((2, 3), ()), arrays((2, 3), (), start=9.0)
    for _ in range(2):
        pending = running(channel.recv)  # The reader waits already while the reply before it goes out.
        time.sleep(0.02)
        channel.send(ff.RoundFrame(others, MODEL, 3.0))
        expected = round_bytes(way, ff.RoundFrame(others, MODEL, 3.0))
        assert exactly(far, len(expected)) == expected
        far.sendall(round_bytes(way, ff.RoundFrame(mine, MODEL, 1.5), "HostFrame"))
        frame = pending.result(WAIT)
        assert equal(frame.tensors, mine)
        assert (frame.kind, frame.weight) == (MODEL, 1.5)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ff.ChannelClosed):
        channel.recv(WAIT)


def test_a_served_relay_and_its_dead(flavour):
    channel, far = flavour.serve("data", "direct", (0, 2))
    far.sendall(relay({"RankExit": {"rank": 2}}))
    assert channel.recv(WAIT) == ff.RelayRankExit(2)
    channel.declare_dead(0)
    expected = relay({"DeclareDead": {"rank": 0}})
    assert exactly(far, len(expected)) == expected


def test_a_rank_that_came_as_to_a_relay_is_not_told_of_deaths(flavour):
    channel, far = flavour.serve("data", "relay")
    channel.declare_dead(RANK)
    channel.close()
    assert exactly(far, 1) == b""


@BOTH
def test_a_served_frame_that_has_begun_is_waited_for(flavour, way):
    channel, far = flavour.serve("data", way)
    data = round_bytes(way, ff.RoundFrame(arrays((3,)), CONTROL), "HostFrame")
    late = []

    def poll():
        while True:
            try:
                return channel.recv(0)
            except TimeoutError:
                late.append(channel._rounds.begun)

    coming = running(poll)
    far.sendall(data[:-1])
    until(lambda: channel._rounds.begun)
    before = len(late)
    time.sleep(0.1)  # in which a call that does not wait comes back many times
    assert len(late) <= before + 1
    far.sendall(data[-1:])
    assert equal(coming.result(WAIT).tensors, arrays((3,)))


@BOTH
def test_a_served_frame_that_stands_still(flavour, way):
    channel, far = flavour.serve("data", way, starvation=0.1)
    far.sendall(round_bytes(way, ff.RoundFrame(arrays((2,)), MODEL, 1.0), "HostFrame")[:12])
    with pytest.raises(ff.ChannelError, match=r"nothing for 0\.1 s, 12 bytes into a frame"):
        channel.recv()
    assert channel.closed


def test_a_frame_larger_than_the_room_made_for_it_at_first(flavour, monkeypatch):
    monkeypatch.setattr(net, "GROWTH", 1000)
    channel, far = flavour.serve("data", "direct")
    tensors = [np.random.default_rng(1).random(100_003, np.float32)]
    running(far.sendall, round_bytes("direct", ff.RoundFrame(tensors, MODEL, 1.0), "HostFrame"))
    assert equal(channel.recv(WAIT).tensors, tensors)


@BOTH
def test_an_announced_size_alone_takes_no_memory(flavour, way):
    channel, far = flavour.serve("data", way)
    size = (1 << 30).to_bytes(4, "little")
    head = size if way == "relay" else relay("HelloAck")[:13] + size + bytes(8)
    tracemalloc.start()
    try:
        far.sendall(head + bytes(1000))
        pending = running(channel.recv)
        time.sleep(0.2)
        assert not pending.done()
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


@BOTH
def test_a_scale_is_multiplied_in_on_the_way(flavour, way):
    channel, far = flavour.connect("data", way)
    mine = arrays((2, 3), (4,))
    scaled = [array * np.float32(0.1) for array in mine]
    controller = served(far, way, scaled, reply=round_bytes(way, ff.RoundFrame(mine, MODEL, 3.0)))
    out = arrays((2, 3), (4,), start=50.0)
    channel.all_reduce(mine, MODEL, 2.0, out=out, scale=0.1)
    controller.result(WAIT)
    assert equal(mine, arrays((2, 3), (4,)))
    assert equal(out, mine)


@BOTH
def test_both_ends_together(flavour, way):
    near, far = socket.socketpair()
    accepted = running(flavour.accept, far, CODEC, WORLD)
    rank = flavour.keep(flavour.DataChannel.connect(near, CODEC, RANK, WORLD, host=HOST if way == "direct" else None))
    controller = flavour.keep(accepted.result(WAIT))
    params = [np.random.default_rng(2).standard_normal(shape, np.float32) for shape in [(1000, 300), (7,), ()]]
    others = [np.random.default_rng(3).standard_normal(p.shape, np.float32) for p in params]
    total = [(np.float32(0) + a + b) * np.float32(1 / 5.0) for a, b in zip(params, others, strict=True)]

    def control():
        for _ in range(3):
            controller.send(ff.reduce_frames([controller.recv(WAIT), ff.RoundFrame(others, MODEL, 3.0)]))

    serving = running(control)
    for _ in range(3):
        out = [p.copy() for p in params]
        frame = rank.all_reduce(out, MODEL, 2.0, out=out)
        assert frame.weight == 5.0
        assert equal(out, total)
    serving.result(WAIT)


# ---------------------------------------------------------------------------------------------- memory, environment

ONE_ROUND = """
import sys
import numpy as np
import flodl_fast as ff
from flodl_fast.channel import DataChannel

def peak(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) << 10

port, host, mib = int(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3])
params = [np.ones(mib << 15, np.float32) for _ in range(8)]
before = peak("VmRSS")
with DataChannel.connect(("127.0.0.1", port), ff.Codec(bytes(range(16))), 1, 3, host=host) as channel:
    for _ in range(2):
        channel.all_reduce(params, ff.RoundKind.MODEL, 1.0, out=params)
assert all((p == 4).all() for p in params)
print(peak("VmHWM") - before)
"""


@BOTH
@measures_memory
def test_a_round_in_place_takes_one_frame_of_memory(way):
    from flodl_fast.channel import accept

    mib = 64
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = [str(listener.getsockname()[1]), HOST if way == "direct" else "", str(mib)]
        with (
            subprocess.Popen([sys.executable, "-c", ONE_ROUND, *arguments], stdout=subprocess.PIPE) as rank,
            accept(listener.accept()[0], CODEC, WORLD) as controller,
        ):
            for _ in range(2):
                frame = controller.recv(WAIT)
                for tensor in frame.tensors:
                    tensor *= 2
                controller.send(frame)
            taken = int(rank.stdout.read())
    assert taken <= (mib + 16) << 20


@pytest.mark.parametrize(
    ("value", "scale"), [(None, 1.0), ("3", 3.0), (" 0.5 ", 0.5), ("0.1", 0.1), ("1e2", 100.0)]
)
def test_the_environment_scales_deadlines(monkeypatch, value, scale):
    if value is None:
        monkeypatch.delenv("FLODL_NET_TIMEOUT_SCALE", raising=False)
    else:
        monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", value)
    assert net.timeout_scale() == scale


@pytest.mark.parametrize("value", ["", "fast", "nan", "inf", "-1", "0.09", "0", "1_0"])
def test_a_scale_that_cannot_be_is_1_with_a_warning(monkeypatch, value):
    monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", value)
    with pytest.warns(UserWarning, match=re.escape(f"FLODL_NET_TIMEOUT_SCALE={value!r}")):
        assert net.timeout_scale() == 1.0


def test_which_deadlines_are_scaled(monkeypatch):
    monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", "0.25")
    assert Deadlines() == Deadlines(
        attempts=15, pause=0.5, first_bytes=2, handshake=10, write_stall=8, reply=30, starvation=60, liveness=8
    )
    monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", "0.1")
    assert Deadlines().first_bytes == 1
    monkeypatch.delenv("FLODL_NET_TIMEOUT_SCALE")
    assert Deadlines() == Deadlines(
        attempts=60, pause=0.5, first_bytes=5, handshake=10, write_stall=30, reply=120, starvation=60, liveness=30
    )


# -------------------------------------------------------------------------------------------------------- revisions

REVISION_PAIRS = [(mine, theirs) for mine in REVISIONS for theirs in REVISIONS if mine != theirs]
VERSIONS = {"control": {"0.6": 2, "0.7": 2, "0.8": 4}, "data": {"0.6": 2, "0.7": 2, "0.8": 3}}


@BOTH
@CHANNELS
def test_the_handshakes_of_each_revision_are_the_oracles(flavour, what, way, revision):
    channel, _ = flavour.connect(what, way, revision)
    told = (SIGNATURES[RANK],) if what == "control" and revision == "0.8" else ()
    assert channel.model_sigs == told
    served, _ = flavour.serve(what, way, revision=revision)
    assert (served.ranks, served.model_sigs) == ((RANK,), told)


def test_a_relay_tells_the_signatures_of_all_its_ranks(flavour):
    channel, _ = flavour.serve("control", "direct", (0, 2), "0.8")
    assert (channel.ranks, channel.model_sigs) == ((0, 2), (SIGNATURES[0], SIGNATURES[2]))


def hello_of_two(signatures):
    record = {"Hello": {"host": HOST, "ranks": [0, 2], "model_sigs": [list(SIGNATURES[0])] * signatures}}
    return CHANNEL_MAGIC["control"].to_bytes(4, "little") + relay(record, "0.8")


@pytest.mark.parametrize("signatures", [0, 1, 3])
def test_a_relay_tells_all_signatures_or_none(flavour, signatures):
    near, far = flavour.pair()
    made = running(flavour.accept, near, ff.Codec(SALT, "0.8"), WORLD)
    far.sendall(hello_of_two(signatures))
    if signatures == 0:
        assert flavour.keep(made.result(WAIT)).model_sigs == ()
        return
    with pytest.raises(ff.HandshakeError, match=rf"ranks \[0, 2\] come with {signatures} model signatures"):
        made.result(WAIT)


@pytest.mark.parametrize(
    ("revision", "options", "error"),
    [
        ("0.6", {"model_sig": bytes(32)}, "revision 0.6 has no model_sig, one of 32 bytes is given"),
        ("0.7", {"model_sig": bytes(32)}, "revision 0.7 has no model_sig, one of 32 bytes is given"),
        ("0.8", {}, "revision 0.8 has a model_sig of 32 bytes, none is given"),
        ("0.8", {"model_sig": bytes(31)}, "revision 0.8 has a model_sig of 32 bytes, one of 31 bytes is given"),
    ],
)
@BOTH
def test_a_signature_that_does_not_fit_the_revision_is_not_sent(flavour, way, revision, options, error):
    near, far = flavour.pair()
    with near, pytest.raises(ff.EncodeError, match=error):
        flavour.ControlChannel.connect(
            near, ff.Codec(SALT, revision), RANK, WORLD, host=HOST if way == "direct" else None, **options
        )
    assert exactly(far, 1) == b""


@CHANNELS
@pytest.mark.parametrize(("mine", "theirs"), [p for p in REVISION_PAIRS if "0.8" in p])
def test_a_hello_of_another_revision_is_refused_at_once(flavour, what, mine, theirs):
    """Its first bytes say so: none that the other revision does not send are waited for."""
    near, far = flavour.pair()
    waits = Deadlines(first_bytes=2 * WAIT, handshake=2 * WAIT)
    made = running(flavour.accept, near, ff.Codec(SALT, mine), WORLD, deadlines=waits)
    far.sendall(greeting(what, "relay", revision=theirs)[0])
    found, expected = (VERSIONS[what][revision] for revision in (theirs, mine))
    names = "0.8" if theirs == "0.8" else "0.6 or 0.7"
    error = rf"{what} hello version {found} \(of {names}\), revision {mine} has {expected}"
    with pytest.raises(ff.HandshakeError, match=error) as raised:
        made.result(WAIT)
    assert isinstance(raised.value.__cause__, ff.VersionMismatchError)


@CHANNELS
@pytest.mark.parametrize(("mine", "theirs"), [p for p in REVISION_PAIRS if "0.8" in p])
def test_an_ack_of_another_revision_is_refused(flavour, what, mine, theirs):
    near, far = flavour.pair()
    signature = {"model_sig": SIGNATURES[RANK]} if (what, mine) == ("control", "0.8") else {}
    connect = {"control": flavour.ControlChannel, "data": flavour.DataChannel}[what].connect
    made = running(connect, near, ff.Codec(SALT, mine), RANK, WORLD, **signature)
    far.sendall(greeting(what, "relay", revision=theirs)[1])
    with pytest.raises(ff.HandshakeError, match=rf"{what} ack version {VERSIONS[what][theirs]} ") as raised:
        made.result(WAIT)
    assert isinstance(raised.value.__cause__, ff.VersionMismatchError)


def test_silence_after_a_hello_may_mean_another_revision(flavour):
    near, _ = flavour.pair()
    deadlines = Deadlines(handshake=0.05)
    with pytest.raises(ff.HandshakeError, match=r"nothing for 0.05 s; a peer does so where .* or revision differ"):
        flavour.ControlChannel.connect(near, CODEC, RANK, WORLD, deadlines=deadlines)


@BOTH
def test_bytes_after_a_reply(flavour, way, revision):
    """0.6 ignores what is left inside a prefix or a record, 0.7 and 0.8 end the stream."""
    channel, far = flavour.connect("data", way, revision)
    params, out = arrays((2, 3)), arrays((2, 3), start=50)
    body = CODEC.encode_round(ff.RoundFrame(params, CONTROL, 0.0)) + b"more"
    reply = ref.add_prefix(body)
    if way == "direct":
        reply = ref.encode_mux(SALT, {"record": "Broadcast", "payload": body.hex()})
    made = running(channel.all_reduce, params, CONTROL, 0.0, out)
    far.sendall(reply)
    if revision == "0.6":
        assert equal(made.result(WAIT).tensors, params)
        return
    with pytest.raises(ff.TrailingDataError, match="4 extra bytes"):
        made.result(WAIT)
    assert equal(out, arrays((2, 3), start=50))
    assert channel.closed


@BOTH
def test_a_reply_in_several_writes(flavour, way, revision):
    """From 0.7 on peers write prefix and body one after the other, and the body in parts."""
    channel, far = flavour.connect("data", way, revision)
    params = arrays((2, 3), (), start=7)
    reply = round_bytes(way, ff.RoundFrame(params, CONTROL, 0.0))
    made = running(channel.all_reduce, arrays((2, 3), ()), CONTROL, 0.0)
    for cut in ((0, 4), (4, 21), (21, 22), (22, len(reply))):
        far.sendall(reply[slice(*cut)])
        time.sleep(0.002)
    assert equal(made.result(WAIT).tensors, params)

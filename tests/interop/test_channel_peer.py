"""Our channels against the crate's live controller, coordinator and relays: handshakes, rounds, messages, ends."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np
import pytest
from channel_support import CODEC, WAIT, Flavour, running
from round_support import measures_memory
from worker_support import Stack, rounded

import flodl_fast as ff
from flodl_fast.net import Deadlines
from flodl_fast.protocol import Revision

MODEL, CONTROL = ff.RoundKind.MODEL, ff.RoundKind.CONTROL
WORLD = 3
HOSTS = "0,1;2"
SHAPES = [(300, 70), (), (0, 3), (5000,)]


@pytest.fixture(params=["blocking", "asyncio"])
def flavour(request):
    made = Flavour(request.param)
    yield made
    made.close()


def connect(flavour, stack, what, rank, way, codec=CODEC, **deadlines):
    """A rank's channel, through its relay or directly."""
    cls = {"data": flavour.DataChannel, "control": flavour.ControlChannel}[what]
    address, host = (stack.relays[what, rank], None) if way == "relay" else (stack.controller, f"direct{rank}")
    options = {"host": host, "deadlines": Deadlines(**deadlines)}
    if what == "control" and codec.revision is Revision.V0_8:
        options["model_sig"] = bytes(32)
    return flavour.keep(cls.connect(address, codec, rank, WORLD, **options))


def connect_all(flavour, stack, what, ways, **deadlines):
    """All ranks' channels. A relay takes one dial after the other, and the controller sums in the order of dials."""
    return [connect(flavour, stack, what, rank, way, stack.codec, **deadlines) for rank, way in enumerate(ways)]


def together(calls):
    """What each of these calls returns; they run at once, as rounds wait for all ranks."""
    return [future.result(WAIT) for future in [running(*call) for call in calls]]


def parameters(rank):
    random = np.random.default_rng(rank)
    return [random.standard_normal(shape, np.float32) for shape in SHAPES]


def average(tensors, weights, ways, wire):
    """The crate's arithmetic: float32 sums from 0 on in rank order, times float32(1 / the summed weight).

    What travels in bf16 is rounded by a relay that has added up, by the controller, and once more when it is divided.
    """
    relayed = ways[:2] == ["relay"] * 2
    pair = rounded(np.float32(0) + tensors[0] + tensors[1], wire if relayed else None)
    return rounded(rounded(pair + tensors[2], wire) * np.float32(1 / sum(weights)), wire)


def bits(arrays):
    return [array.tobytes() for array in arrays]


WAYS = {"relays": ["relay"] * 3, "direct": ["direct"] * 3, "mixed": ["relay", "relay", "direct"]}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_three_ranks_form_count_and_average(flavour, peer_build, ways, revision):
    with Stack(peer_build(revision), "--hosts", HOSTS, revision=revision) as stack:
        channels = connect_all(flavour, stack, "data", ways)

        params = [parameters(rank) for rank in range(WORLD)]
        root = bits(parameters(0))
        together((c.broadcast, p, 0, p) for c, p in zip(channels, params, strict=True))
        assert [bits(p) for p in params] == [root] * WORLD

        counts = together((c.gather, 3 * rank + 1) for rank, c in enumerate(channels))
        assert [count.tolist() for count in counts] == [[1.0, 4.0, 7.0]] * WORLD

        def all_reduce(channel, tensors, mass, out, wire):
            return channel.all_reduce(tensors, MODEL, mass, out, scale=mass, wire=wire)

        wires = [None] * 3 if revision == "0.6" else [None, "bf16"] * 2
        for round_, wire in enumerate(wires):
            # At first rank 0 has not trained, which 0.8 tells without its zeros.
            masses = [float(round_ + rank) for rank in range(WORLD)]
            given = [parameters(10 * round_ + rank) for rank in range(WORLD)]
            sent = [
                [rounded(p * np.float32(mass), wire) for p in tensors]
                for tensors, mass in zip(given, masses, strict=True)
            ]
            expected = [average(tensors, masses, ways, wire) for tensors in zip(*sent, strict=True)]
            rounds = zip(channels, given, masses, params, [wire] * WORLD, strict=True)
            frames = together((all_reduce, *round_) for round_ in rounds)
            assert [frame.weight for frame in frames] == [sum(masses)] * WORLD
            assert [bits(p) for p in params] == [bits(expected)] * WORLD

        # Nobody trained: local state stays.
        for wire in wires[-2:]:
            rounds = zip(channels, given, [0.0] * WORLD, params, [wire] * WORLD, strict=True)
            frames = together((all_reduce, *round_) for round_ in rounds)
            assert not any(frame.realized for frame in frames)
            assert [bits(p) for p in params] == [bits(expected)] * WORLD


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_messages_cross_in_both_directions(flavour, peer_build, ways, revision):
    options = ("--hosts", HOSTS, "--samples", "96", "--batch", "32", "--epochs", "1")
    with Stack(peer_build(revision), *options, revision=revision) as stack:
        data = connect_all(flavour, stack, "data", ways)
        control = connect_all(flavour, stack, "control", ways)
        plans = []
        for rank, channel in enumerate(control):
            channel.send(ff.Heartbeat(rank, 0))
            while not isinstance(message := channel.recv(WAIT), ff.StartEpoch):
                assert isinstance(message, (ff.SetEpochCallbackRole, ff.CoordHeartbeat, ff.SetGlobalStep))
            plans.append(message.plan)
        assert sorted((p.epoch, p.partition_offset, p.partition_size) for p in plans) == [
            (0, 0, 32), (0, 32, 32), (0, 64, 32)
        ]
        for rank, channel in enumerate(control):
            if revision != "0.6":
                gpu = ff.GpuSnapshot(0, "none", None, 1, 2)
                sample = ff.ResourceSample(12.5, 1 << 30, 1 << 40, None, None, None, None, [gpu])
                channel.send(ff.TimingResourceSample(rank, sample))
            channel.send(ff.Batch(rank, 1.0, 0.5, 1, None, 0.25 * rank))
        rounds = []
        for rank, channel in enumerate(control):
            while not isinstance(message := channel.recv(WAIT), ff.RequestParams):
                assert isinstance(message, ff.CoordHeartbeat)
            channel.send(ff.SnapshotReady(rank))
            rounds.append((data[rank].gather, 1))
        assert [count.tolist() for count in together(rounds)] == [[1.0] * WORLD] * WORLD
        # An epoch's report overtakes its batches in the coordinator, so it waits for the average; else the epoch, and
        # with it the run, may end before one is asked for.
        metrics = {}
        for rank, channel in enumerate(control):
            channel.send(ff.SyncAck(rank, 0, 0.01, 1.0, 1.0))
            channel.send(ff.MetricsMsg(rank, 0, 0.25 * rank, 1, 10.0, 32, 1.5, 1.0, 0.5, {"acc": (rank + 1.0, 1)}))
        for rank, channel in enumerate(control):
            while not isinstance(message := channel.recv(WAIT), ff.Shutdown):
                if isinstance(message, ff.EpochAggregated):
                    metrics[rank] = message.metrics
            assert metrics[rank].avg_loss == 0.25
            assert metrics[rank].scalars == {"acc": 2.0}
            each = ([], []) if revision == "0.6" else ([0.0, 0.25, 0.5], [32] * WORLD)
            assert (metrics[rank].per_rank_loss, metrics[rank].per_rank_samples) == each
            channel.send(ff.Exiting(rank))
        for channel in (*control, *data):
            channel.close()
        done = stack.lines()[-1]
        assert (done["done"], done["dead"], done["last_epoch"], done["global_step"]) == (True, 0, 0, 3)


def test_another_salt_is_refused_by_the_controller(flavour, peer_binary):
    with Stack(peer_binary, "--hosts", HOSTS) as stack, pytest.raises(ff.HandshakeError, match="the handshake failed:"):
        connect(flavour, stack, "data", 0, "direct", ff.Codec(bytes(16)))


def test_another_salt_is_refused_by_a_relay(flavour, peer_binary):
    with Stack(peer_binary, "--hosts", HOSTS) as stack, pytest.raises(ff.HandshakeError, match="salt, rank, world"):
        connect(flavour, stack, "control", 0, "relay", ff.Codec(bytes(16)))


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_a_controller_that_is_killed_inside_a_round(flavour, peer_binary, ways):
    with Stack(peer_binary, "--hosts", HOSTS) as stack:
        channels = connect_all(flavour, stack, "data", ways)
        params = [parameters(rank) for rank in range(2)]
        pending = [running(c.all_reduce, p, MODEL, 1.0, p) for c, p in zip(channels[:2], params, strict=True)]
        time.sleep(0.1)  # Rank 2 gives nothing, so both wait.
        stack.process.kill()
        for rank, round_ in enumerate(pending):
            with pytest.raises(ff.ChannelError):
                round_.result(WAIT)
            assert bits(params[rank]) == bits(parameters(rank))
            with pytest.raises(ff.ChannelClosed, match="the channel is closed: "):
                channels[rank].gather(1.0)


@pytest.mark.parametrize("way", ["relay", "direct"])
def test_frames_larger_than_any_buffer(flavour, peer_binary, way):
    with Stack(peer_binary, "--hosts", HOSTS) as stack:
        channels = connect_all(flavour, stack, "data", [way] * WORLD)
        params = [[np.full(1 << 20, rank, np.float32)] for rank in range(WORLD)]
        together((c.all_reduce, p, MODEL, 1.0, p) for c, p in zip(channels, params, strict=True))
        assert all((p[0] == 1).all() for p in params)


BIG = 256  # MiB
BIG_ROUND = """
import json, sys, time
import numpy as np
import flodl_fast as ff

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10

rank, port, mib = map(int, sys.argv[1:])
params = [np.full(mib << 15, rank + 1, np.float32) for _ in range(8)]
before = status("VmRSS")
with ff.DataChannel.connect(("127.0.0.1", port), ff.Codec(bytes(range(16))), rank, 2) as channel:
    started, cpu = time.perf_counter(), time.process_time()
    channel.all_reduce(params, ff.RoundKind.MODEL, 1.0, out=params)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert all((p == 1.5).all() for p in params)
    print(json.dumps({"taken": status("VmHWM") - before, "wall": wall, "cpu": cpu}), flush=True)
    sys.stdin.read()  # A data channel that closes ends the rounds of all.
"""


@measures_memory
def test_a_round_of_256_mib_takes_one_frame_of_memory(peer_binary):
    # The crate's own passes over such a frame take long enough for its deadlines to pass on a busy machine.
    env = {**os.environ, "FLODL_NET_TIMEOUT_SCALE": "10"}
    with Stack(peer_binary, "--hosts", "0;1", env=env) as stack, ExitStack() as stopping:
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-c", BIG_ROUND, str(rank), str(stack.relays["data", rank][1]), str(BIG)]
            process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ranks.append(stopping.enter_context(process))
            stopping.callback(process.kill)
        told = [json.loads(rank.stdout.readline()) for rank in ranks]
        for rank in ranks:
            rank.stdin.close()
    data = bytes(64 << 20)
    started = time.perf_counter()
    hashlib.sha256(data)
    one_pass = (time.perf_counter() - started) * BIG / 64
    for rank in told:
        print(
            f"{BIG} MiB through relays: {rank['wall']:.1f} s, {BIG / rank['wall']:.0f} MiB/s; of that this rank's own "
            f"{rank['cpu']:.2f} s, where a pass of SHA-256 takes {one_pass:.2f} s and a round needs two"
        )
        assert rank["taken"] <= (BIG + 16) << 20

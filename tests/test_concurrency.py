"""What may be shared between threads is, and what is started and stopped leaves nothing behind.

Every test has a dead man's handle: where it hangs, the stacks of all threads are printed and the run ends. Starts and
stops are FLODL_FAST_STARTS of each kind; a few unless it is set.
"""

from __future__ import annotations

import faulthandler
import os
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from channel_support import CODEC, HOST, RANK, WORLD, running
from conftest import SALT
from local_support import LocalStack, train
from round_support import noise, words
from support import drawn

import flodl_fast as ff
from flodl_fast import channel

THREADS = 8
HANGS = 120  # seconds after which a test is taken to hang
STARTS = int(os.environ.get("FLODL_FAST_STARTS", "0"))
WAIT = 30.0


@pytest.fixture(autouse=True)
def dead_mans_handle():
    faulthandler.dump_traceback_later(HANGS + STARTS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def in_threads(work):
    """What a function of a number gives in so many threads that all start at once."""
    start = threading.Barrier(THREADS)

    def run(number):
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("revision", [revision.value for revision in ff.Revision])
def test_one_codec_in_eight_threads(revision):
    """Every kind of frame, encoded, decoded and refused, and each thread gets what one alone would."""
    codec = ff.Codec(SALT, revision)
    messages = drawn(71, 120, entries=3)
    frames = [codec.encode(message) for message in messages]
    stream = b"".join(frames)
    rounds = [codec.encode_round(ff.RoundFrame([noise(i, size)], weight=1.0)) for i, size in enumerate((3, 999, 30_000))]
    records = [codec.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, i, frame)) for i, frame in enumerate(frames[:50])]
    columns = {name: rows.tolist() for name, rows in codec.timing_columns(stream).items()}

    def work(number):
        rng = random.Random(number)
        done = 0
        for _ in range(60):
            i = rng.randrange(len(frames))
            assert codec.encode(messages[i]) == frames[i]
            assert codec.encode(codec.decode(frames[i])) == frames[i]
            raw = rng.choice(rounds)
            assert codec.encode_round(codec.decode_round(raw)) == raw
            assert codec.encode_round(codec.decode_round(raw, copy=False)) == raw
            record = rng.choice(records)
            assert codec.encode_mux(codec.decode_mux(record)) == record
            for read, bad in ((codec.decode, frames[i]), (codec.decode_round, raw), (codec.decode_mux, record)):
                with pytest.raises(ff.DecodeError):
                    read(bad[:-1] + bytes([bad[-1] ^ 1]))
            done += 1
        assert codec.encode_many(codec.decode_many(stream)[0]) == stream
        assert repr({name: rows.tolist() for name, rows in codec.timing_columns(stream).items()}) == repr(columns)
        reader = ff.FrameReader(codec, "control")
        reader.feed(stream)
        assert [codec.encode(message) for message in reader] == frames
        return done

    assert in_threads(work) == [60] * THREADS


def test_folds_in_threads_have_the_same_bits():
    """Sums over the same frames, all at once or one by one, while other threads do the same."""
    frames = [ff.RoundFrame([noise(i, 20_000), noise(i + 50, 7)], weight=i + 1.0) for i in range(5)]
    expected = [words(tensor) for tensor in ff.reduce_frames(frames).tensors]

    def work(number):
        for _ in range(8):
            fold = ff.RoundFold()
            for frame in frames:
                fold.add(frame)
            for reduced in (ff.reduce_frames(frames), fold.reduce()):
                assert [words(tensor) for tensor in reduced.tensors] == expected
        return number

    assert in_threads(work) == list(range(THREADS))


def test_threads_decode_into_arrays_of_their_own():
    """One layout and one frame, as many targets as threads; what one writes no other sees."""
    arrays = [noise(1, 50_000), noise(2, 3, 4)]
    layout = ff.TensorLayout.of(arrays)
    raw = layout.encode(CODEC, arrays, ff.RoundKind.MODEL, 2.0)

    def work(number):
        out = [np.zeros_like(array) for array in arrays]
        for _ in range(10):
            out[0][:] = number
            assert layout.decode_into(CODEC, raw, out) == (ff.RoundKind.MODEL, 2.0)
            assert [words(array) for array in out] == [words(array) for array in arrays]
            assert layout.encode(CODEC, out, ff.RoundKind.MODEL, 2.0) == raw
        return number

    assert in_threads(work) == list(range(THREADS))


def pair(what, way):
    """The two ends of a channel, each an object of the package."""
    near, far = socket.socketpair()
    host = HOST if way == "direct" else None
    served = running(channel.accept, near, CODEC, WORLD)
    cls = {"control": channel.ControlChannel, "data": channel.DataChannel}[what]
    mine = cls.connect(far, CODEC, RANK, WORLD, host=host)
    return mine, served.result(WAIT)


@pytest.mark.parametrize("way", ["relay", "direct"])
def test_a_reader_and_a_writer_at_each_end_of_a_channel(way):
    """Four threads on one connection, both directions full at once: all arrives, in order."""
    mine, served = pair("control", way)
    up = [ff.Heartbeat(RANK, i) if i % 3 else ff.DashboardSetMetadata(RANK, "x" * 50_000) for i in range(600)]
    down = [ff.SetGlobalStep(i) if i % 3 else ff.NewNcclSession(bytes(50_000), i, 3) for i in range(600)]

    def send(end, messages, **to):
        for message in messages:
            end.send(message, **to)

    def take(end, n):
        found = [end.recv(WAIT) for _ in range(n)]
        return [getattr(item, "message", item) for item in found]

    with mine, served:
        writers = [running(send, mine, up), running(send, served, down, **({"rank": RANK} if way == "direct" else {}))]
        readers = [running(take, served, len(up)), running(take, mine, len(down))]
        assert readers[0].result(WAIT) == up
        assert readers[1].result(WAIT) == down
        for writer in writers:
            writer.result(WAIT)


def test_closing_wakes_every_thread_that_waits():
    mine, served = pair("control", "relay")
    waiting = [running(mine.recv), running(served.recv)]
    time.sleep(0.05)
    mine.close()
    for call in waiting:
        with pytest.raises(ff.ChannelError):
            call.result(WAIT)
    served.close()


# ---------------------------------------------------------------------------------------------------- starts and stops


def left():
    """The file descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def settles(at_most):
    """Whether descriptors and threads come down to so many; a thread ends a little after what it did."""
    deadline = time.monotonic() + WAIT
    while any(now > most for now, most in paired(left(), at_most)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(now <= most for now, most in paired(left(), at_most))


def paired(found, most):
    return zip(found, most, strict=True)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in Linux's /proc")


@needs_proc
@pytest.mark.parametrize("way", ["relay", "direct"])
@pytest.mark.parametrize("what", ["control", "data"])
def test_channels_leave_nothing_open(what, way):
    before = left()
    for i in range(STARTS or 50):
        mine, served = pair(what, way)
        if what == "control":
            mine.send(ff.Heartbeat(RANK, i))
            assert served.recv(WAIT) is not None
        for end in (mine, served)[:: 1 if i % 2 else -1]:
            end.close()
    assert settles(before)


@needs_proc
def test_channels_whose_handshake_fails_leave_nothing_open():
    before = left()
    for _ in range(STARTS or 50):
        near, far = socket.socketpair()
        served = running(channel.accept, near, ff.Codec(bytes(16)), WORLD)  # of another salt
        with pytest.raises(ff.FlodlError):
            channel.ControlChannel.connect(far, CODEC, RANK, WORLD)
        with pytest.raises(ff.FlodlError):
            served.result(WAIT)
    assert settles(before)


@needs_proc
def test_workers_and_clusters_leave_nothing_open():
    """Whole lives of a rank: in a cluster, trained one epoch, averaged, ended."""
    before = left()
    for i in range(STARTS or 8):
        with LocalStack("--hosts", "0", "--samples", 32, "--batch", 32, "--epochs", 1) as stack:
            seen = train(stack.options(0, direct=bool(i % 2)))
            done = stack.lines()[-1]
        assert (done["global_step"], done["dead"]) == (1, 0)
        assert seen.params[0].tolist() == [0.5] * 6
    assert settles(before)

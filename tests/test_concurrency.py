"""What may be shared between threads is.

Every test has a dead man's handle: where it hangs, the stacks of all threads are printed and the run ends.
"""

from __future__ import annotations

import faulthandler
import random
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from channel_support import CODEC, HOST, RANK, WAIT, WAYS, WORLD, running
from conftest import SALT
from round_support import noise, words
from support import drawn

import flodl_fast as ff
from flodl_fast import channel

THREADS = 8
HANGS = 120  # seconds after which a test is taken to hang


@pytest.fixture(autouse=True)
def dead_mans_handle():
    faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.__stderr__)
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
    rounds = [codec.encode_round(ff.RoundFrame([noise(1, size)], weight=1.0)) for size in (3, 999, 30_000)]
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
    """Sums over the same frames, all at once or one by one, while other threads do the same; NaN bits aside."""

    def values(frame):
        return [words(np.where(np.isnan(tensor), np.float32(np.nan), tensor)) for tensor in frame.tensors]

    frames = [ff.RoundFrame([noise(i, 20_000), noise(i + 50, 7)], weight=i + 1.0) for i in range(5)]
    expected = values(ff.reduce_frames(frames))

    def work(number):
        for _ in range(8):
            fold = ff.RoundFold()
            for frame in frames:
                fold.add(frame)
            for reduced in (ff.reduce_frames(frames), fold.reduce()):
                assert values(reduced) == expected
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


@pytest.mark.parametrize("way", WAYS)
def test_a_reader_and_a_writer_at_each_end_of_a_channel(way):
    """Four threads on one connection, both directions full at once: all arrives, in order."""
    near, far = socket.socketpair()
    accepted = running(channel.accept, near, CODEC, WORLD)
    mine = channel.ControlChannel.connect(far, CODEC, RANK, WORLD, host=HOST if way == "direct" else None)
    served = accepted.result(WAIT)
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

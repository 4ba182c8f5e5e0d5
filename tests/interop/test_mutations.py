"""Mutated frames against the published crates, live: the crate's outcome, or a stricter one of a documented list.

FLODL_FAST_MUTATIONS is how many frames are tried, 4,500 unless it is set (docs/reliability.md has the list and a count
of 200,000); other ones each time it is.
"""

from __future__ import annotations

import math
import os
import random
import struct
from collections import Counter

import pytest
import reference as ref
from conftest import SALT, golden
from generate import messages, mutated
from round_support import numpy_holds
from support import NUMBER_OF, codec_at
from test_differential import TAKEN_DOWN, refusal, same_outcome

import flodl_fast as ff
from flodl_fast._round import RoundMeter

GIVEN = os.environ.get("FLODL_FAST_MUTATIONS")
FRAMES = int(GIVEN or 4500) // 9  # for each of three kinds of frame at three revisions
DTYPES = {"0.6": {0: 4}, "0.7": {0: 4, 1: 2}, "0.8": {0: 4, 1: 2}}  # wire number and size of each (docs/wire.md §6)


@pytest.fixture
def rng(revision):
    return random.Random(None if GIVEN else f"mutations {revision}")


@pytest.fixture
def codec(revision):
    return codec_at(revision)


def several(rng, data, others):
    """`data` mutated once or more, its first bytes as often as the rest."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.3:
            cut = min(len(data), 24)
            data = mutated(rng, data[:cut], rng.choice(others)[:cut]) + data[cut:]
        elif rng.random() < 0.3:
            at = rng.randrange(8 * len(data) or 1)
            data = b"" if not data else bytes([*data[:at // 8], data[at // 8] ^ 1 << at % 8, *data[at // 8 + 1:]])
        else:
            data = mutated(rng, data, rng.choice(others))
    return data


def tally(outcomes, *names):
    """That each outcome was met, once enough frames were tried to meet it."""
    assert set(outcomes) <= set(names)
    if FRAMES >= 500:
        assert set(outcomes) == set(names), outcomes


def test_control_frames(peer, revision, codec, rng):
    version = codec.encode(ff.SyncNow())[4:8]
    payloads = [(NUMBER_OF[kind], codec.encode_payload(ff.from_json(kind, value, revision=revision)))
                for kind, value in messages(131, 400, revision=revision, entries=2)]
    payloads = [(kind, payload[:600]) for kind, payload in payloads]
    others = [payload for _, payload in payloads]
    outcomes = Counter()
    for _ in range(FRAMES):
        kind, payload = rng.choice(payloads)
        payload, size = several(rng, payload, others), None
        if rng.random() < 0.05:
            kind = rng.choice((0, 1, 2, 4, 5, 7, 8, 255, 1 << 31))
        if rng.random() < 0.1:
            size = rng.choice((0, 1, len(payload) - 1, len(payload) + 1, 1 << 24, (1 << 24) + 1, (1 << 32) - 1))
        signed = struct.pack("<II", kind, max(0, len(payload) if size is None else size)) + payload
        frame = struct.pack("<I", ref.CONTROL_FRAME) + version + ref.mac8(SALT, signed) + signed
        if rng.random() < 0.1:
            frame = several(rng, frame, others)
        crate = peer("decode", revision).ask({"salt": SALT.hex(), "frame": frame.hex()})
        assert same_outcome(codec, crate, frame), (frame.hex(), crate)
        taken_down = crate in TAKEN_DOWN
        outcomes["down" if taken_down else next(key for key in ("eof", "error", "payload", "msg") if key in crate)] += 1
    outcomes.pop("down", None)
    tally(outcomes, "eof", "error", "payload", "msg")


def settled(codec, body):
    """The body with a MAC that holds where its own sizes say that it ends, if they say so; else at its end."""
    try:
        size = RoundMeter(codec).measure(body + bytes(8))
    except ff.DecodeError:
        size = None
    end = len(body) if size is None else size - 8
    return body[:end] + ref.mac8(SALT, body[:end]) + body[end:]


def expected_refusal(codec, crate):
    """What is wrong with tensors that the crate's reader took, by the documented list; None where nothing is."""
    revision, total = codec.revision.value, 0
    for tensor in crate["tensors"]:
        size, shape = len(tensor["bytes"]) // 2, tensor["shape"]
        width = DTYPES[revision].get(tensor["dtype"])
        whole = math.prod(shape) * (width or 0)
        if width is None or (size != whole and not (revision == "0.8" and size == 0)):
            return ff.TensorError
        total += whole
        if total > codec.frame_ceiling:
            return ff.LimitError
    return None if all(numpy_holds(tensor["shape"]) for tensor in crate["tensors"]) else ff.TensorError


def test_round_frames(peer, revision, codec, rng):
    bodies = [bytes.fromhex(case["bytes"])[:-8] for case in golden("round", revision)]
    outcomes = Counter()
    for _ in range(FRAMES):
        body = several(rng, rng.choice(bodies), bodies)[:3000]
        raw = settled(codec, body) if rng.random() < 0.9 else body
        crate = peer("round", revision).ask({"op": "decode", "salt": SALT.hex(), "bytes": raw.hex()})
        found = refusal(codec.decode_round, raw)
        if "eof" in crate:
            assert (found, len(raw) < 8) == (ff.TruncatedError, True), raw.hex()
            outcomes["eof"] += 1
        elif "frame" not in crate:
            assert found is not None, (raw.hex(), crate)
            outcomes["error"] += 1
        elif found is None:
            layout, frame = ff.TensorLayout.from_frame(codec, raw), crate["frame"]
            assert len(raw) - layout.frame_size == crate["left"]
            assert raw[8] == ff.RoundKind[frame["kind"].upper()]
            assert raw[9:17] == bytes.fromhex(frame["weight_bits"])[::-1]
            ours = [
                {"dtype": int(dtype), "shape": shape[:ndim].tolist(), "bytes": raw[at:at + nbytes].hex()}
                for dtype, ndim, shape, nbytes, at in zip(
                    layout.dtype, layout.ndim, layout.shape, layout.nbytes, layout.offset, strict=True)
            ]
            assert ours == frame["tensors"], raw.hex()
            outcomes["frame"] += 1
        else:
            assert found is expected_refusal(codec, crate["frame"]), raw.hex()
            outcomes["stricter"] += 1
    tally(outcomes, "eof", "error", "frame", "stricter")


def test_mux_records(peer, revision, codec, rng):
    bodies = [bytes.fromhex(case["bytes"]) for case in golden("wire", revision) if case["op"] == "mux"]
    bodies = [record[8:13] + record[25:] for record in bodies]
    outcomes = Counter()
    for _ in range(FRAMES):
        body = several(rng, rng.choice(bodies), bodies)
        head, payload = body[:5].ljust(5, b"\1"), body[5:]
        size = rng.choice((0, len(payload) + 1, 1 << 30, (1 << 30) + 1)) if rng.random() < 0.1 else len(payload)
        header = struct.pack("<II", ref.MUX_RECORD, ref.MUX_VERSION) + head + struct.pack("<I", size)
        raw = header + ref.mac8(SALT, header + payload) + payload
        if rng.random() < 0.1:
            raw = several(rng, raw, bodies)
        crate = peer("wire", revision).ask({"op": "mux_decode", "salt": SALT.hex(), "bytes": raw.hex()})
        found = refusal(codec.decode_mux, raw)
        if "eof" in crate:
            assert (found, len(raw) < 25) == (ff.TruncatedError, True), raw.hex()
            outcomes["eof"] += 1
        elif "error" in crate:
            assert found is not None, (raw.hex(), crate)
            outcomes["error"] += 1
        else:
            assert crate["left"] == len(raw) - codec.measure_record(raw)
            assert same_record(codec.decode_mux(raw), crate["debug"]), (raw.hex(), crate)
            outcomes["record"] += 1
    tally(outcomes, "eof", "error", "record")


def same_record(record, debug):
    """Whether a record is what Rust's debug text says; of a text only that it is there."""
    name = record.kind.name.title().replace("_", "")
    if record.kind is ff.MuxKind.CONTROL:
        message = record.payload
        shown = f"Control({type(message).__name__.removeprefix('Relay')}"
        numbers = {key: getattr(message, key) for key in ("rank", "ranks") if hasattr(message, key)}
        return debug.startswith(shown) and all(f"{key}: {value}" in debug for key, value in numbers.items())
    rank = f"rank: {record.rank}, " if record.kind is ff.MuxKind.DATA else ""
    return debug == f"{name} {{ {rank}payload: {list(record.payload)} }}"

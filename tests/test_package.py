"""The package as a whole: what its import brings along, what help shows, what a slip is told."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
from conftest import SALT

import flodl_fast as ff

SLOW = {"argparse", "asyncio", "email", "importlib.metadata", "pathlib", "ssl"}


def test_an_import_brings_nothing_that_is_slow_to_import_and_seldom_needed():
    code = "import numpy, sys; had = set(sys.modules); import flodl_fast; print(*set(sys.modules) - had)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert SLOW.isdisjoint(done.stdout.split())


def test_a_python_without_numpy_is_named():
    code = "import sys; sys.modules['numpy'] = None; import flodl_fast"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"flodl_fast needs NumPy, and {sys.executable} has none: run the Python that" in done.stderr.splitlines()[-1]


def test_what_is_imported_late_is_there_all_the_same():
    assert {"aio", "__version__", "Codec"} <= set(dir(ff))
    assert ff.LocalCluster.__module__ == "flodl_fast.local"
    assert ff.aio.ControlChannel.__module__ == "flodl_fast.aio"
    assert ff.__version__.split(".")[0].isdecimal()
    with pytest.raises(AttributeError, match="'flodl_fast' has no attribute 'Codek'"):
        ff.Codek  # noqa: B018


def test_help_shows_how_a_codec_is_made():
    assert list(inspect.signature(ff.Codec).parameters)[:3] == ["salt", "revision", "max_payload"]
    assert inspect.signature(ff.Codec).parameters["max_payload"].default == ff.Codec(SALT).max_payload


def test_a_salt_for_a_codec_is_refused_before_anything_is_dialled():
    nowhere = ("192.0.2.1", 1)
    with pytest.raises(TypeError, match="codec: expected a Codec, got str"):
        ff.Worker([np.zeros(1, np.float32)], rank=0, world=1, codec="00" * 16, data=nowhere, control=nowhere)


def test_a_frame_of_another_kind_is_named():
    codec = ff.Codec(SALT)
    control = codec.encode(ff.Exiting(0))
    round_ = codec.encode_round(ff.RoundFrame([]))
    for call, frame, words in (
        (codec.decode, round_, "control frame's magic 0xf10d17c4, got 0xf10d17f1, a round frame's"),
        (codec.decode_round, control, "round frame's magic 0xf10d17f1, got 0xf10d17c4, a control frame's"),
        (codec.decode_mux, control + bytes(8), "mux record's magic 0xf10d17d0, got 0xf10d17c4"),
        (codec.check_data_ack, codec.control_ack()[:8], "data ack's magic 0xf10d17c1, got 0xf10d17c3, a control ack's"),
        (codec.decode, b"GET /state.json HTTP/1.1\r\n", "got 0x20544547, which is none of flodl's"),
    ):
        with pytest.raises(ff.BadMagicError, match=words):
            call(frame)


def test_a_length_prefix_too_many_or_too_few_is_named():
    codec = ff.Codec(SALT)
    with pytest.raises(ff.BadMagicError, match=r"got 0x1a, a length prefix of 26 bytes before it \(prefixed=True\)$"):
        codec.decode(codec.encode_many([ff.Exiting(0)], prefixed=True))
    frame = codec.encode(ff.Exiting(0))
    words = r"\(frame_ceiling\): it is a control frame's magic, without a prefix before it$"
    with pytest.raises(ff.LimitError, match=words):
        codec.decode_many(frame, prefixed=True)
    reader = ff.FrameReader(codec, "control", prefixed=True)
    reader.feed(frame)
    with pytest.raises(ff.LimitError, match=words):
        reader.next()
    with pytest.raises(ff.LimitError, match=r"\(frame_ceiling\)$"):
        codec.decode_many(b"\xff" * 24, prefixed=True)

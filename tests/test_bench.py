"""bench: what it prints, as a table and as an object, and its picture. How fast anything is, no test says."""

from __future__ import annotations

import json
import sys

import pytest

from flodl_fast import bench
from flodl_fast.cli import main

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]
ROUNDS = ["encode into a buffer", "decode into arrays", "MAC", "average of 4 frames", "hashlib.sha256", "memcpy"]


@pytest.fixture(autouse=True)
def quicker(monkeypatch):
    """A figure from one call is one as well."""
    monkeypatch.setattr(bench, "_least", lambda call, seconds: (call(), 1e-6)[1])


def test_an_object(capsys):
    assert main(["bench", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["kernels", "messages_ns", "sizes", "rounds_gb_per_s"]
    assert found["sizes"] == SIZES
    assert list(found["rounds_gb_per_s"]) == ROUNDS
    assert found["messages_ns"]["Batch: encode"] == pytest.approx(1000)
    assert found["messages_ns"]["10,000 Batches at once: columns"] == pytest.approx(0.1)
    assert found["rounds_gb_per_s"]["MAC"] == pytest.approx([size / 1000 for size in SIZES])
    assert found["rounds_gb_per_s"]["average of 4 frames"] == pytest.approx([size / 250 for size in SIZES])


def test_tables(capsys):
    assert main(["bench", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("  Batch: decode")).split()[-1] == "1,000"
    (header,) = [line for line in lines if "GB/s" in line]
    assert header.split() == ["GB/s", "4", "KiB", "16", "KiB", "64", "KiB", "256", "KiB", "1", "MiB"]
    assert [line.strip()[: len(name)] for line, name in zip(lines[-6:], ROUNDS, strict=True)] == ROUNDS


def test_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--quick", "--plot", str(tmp_path / "rates.png")]) == 0
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--quick", "--plot", str(tmp_path / "rates.png")]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "matplotlib is not installed: pip install 'flodl_fast[plot]'\n")


def test_what_is_measured_is_right():
    codec = bench.Codec(bytes(16))
    calls = {name: (call, n) for name, call, n in bench._rounds(codec, 4096)}
    average, _ = calls["average of 4 frames"]
    assert average().tensors[0].tolist() == [2.5] * 1024
    encode, _ = calls["encode into a buffer"]
    assert encode() == 4096 + 17 + 14 + 8
    assert calls["hashlib.sha256"][0]() != b""

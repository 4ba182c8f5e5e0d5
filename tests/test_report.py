"""inspect for people: filters, sums, following, pictures, colours, and what it says without its extras."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import SALT
from packet_support import Talk, pcap
from support import CODEC

import flodl_fast as ff
from flodl_fast.capture import CaptureWriter, Direction
from flodl_fast.cli import main
from flodl_fast.inspection import every_kind, inspect_frames
from flodl_fast.summary import Summary

COMMAND = [sys.executable, "-m", "flodl_fast", "inspect"]
TRAFFIC = Path(__file__).parent / "traffic"
RELAY = str(TRAFFIC / "relay-0.7.pcapng")
SALTED = ["--salt", SALT.hex()]
SECOND = 10**9


@pytest.fixture
def run(capsys):
    """Calls main: run("file", ...) -> (exit code, standard output)."""

    def call(*argv):
        return main(["inspect", *map(str, argv)]), capsys.readouterr().out

    return call


def capture(path, frames):
    """A capture of (seconds, leg, direction, frame)."""
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for seconds, leg, direction, frame in frames:
            writer.write(frame, leg, direction, time_ns=SECOND * 1000 + int(seconds * SECOND))
    return path


def summarise(path, salt=SALT):
    summary = Summary()
    with open(path, "rb") as file:
        for index, entry in enumerate(inspect_frames(file, salt=salt)):
            summary.add(index, entry)
    return summary


# ------------------------------------------------------------------------------------------------------------- filters


def shown(out):
    return [json.loads(line) for line in out.splitlines()]


def test_frames_of_a_kind(run):
    everything = shown(run(RELAY, *SALTED, "--json")[1])
    for words, holds in (
        (["Batch"], lambda e: e.get("name") == "Batch" or e.get("inner", {}).get("name") == "Batch"),
        (["metrics"], lambda e: "Metrics" in (e.get("kind"), e.get("inner", {}).get("kind"))),
        (["round", "data hello"], lambda e: {e["frame"], e.get("inner", {}).get("frame")} & {"round", "data hello"}),
    ):
        _, out = run(RELAY, *SALTED, "--json", *(word for kind in words for word in ("--kind", kind)))
        assert shown(out) == [entry for entry in everything if holds(entry)]
        assert 0 < len(shown(out)) < len(everything)


@pytest.mark.parametrize(("word", "error"), [
    ("bath", "no frame is called 'bath'; did you mean Batch?"),
    ("evalresults", "did you mean EvalResult?"),
    ("lobster", "no frame is called 'lobster'; known are Abort, Accept, Batch, "),
])
def test_a_kind_that_no_frame_has(run, capsys, word, error):
    with pytest.raises(SystemExit) as caught:
        run(RELAY, "--kind", word)
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(TRAFFIC.glob("*.pcap*")), ids=lambda path: path.name)
def test_the_kinds_of_all_frames_are_known(path):
    known = {(entry.frame, entry.kind, entry.name) for entry in every_kind()}
    with path.open("rb") as file:
        entries = list(inspect_frames(file, salt=SALT))
    entries += [entry.inner for entry in entries if entry.inner]
    assert {(entry.frame, entry.kind, entry.name) for entry in entries} <= known


def test_frames_of_a_rank(run):
    """Those of its legs, whoever they name, and those in records that bear its number."""
    code, out = run(RELAY, *SALTED, "--json", "--rank", "1")
    legs = {entry.get("leg") for entry in shown(out)}
    assert code == 0
    assert legs == {"rank 1 control", "rank 1 data", "host0 control", "host0 data"}
    names = {entry.get("name") for entry in shown(out) if entry["leg"] == "rank 1 control"}
    assert {"StartEpoch", "SetEpochCallbackRole", "Batch"} <= names  # the second is about rank 0
    both = shown(run(RELAY, *SALTED, "--json", "--rank", "1", "--rank", "2")[1])
    assert len(both) > len(shown(out))


@pytest.mark.parametrize("view", [[], ["--json"], ["--summary"]])
def test_filters_that_leave_nothing_say_so(run, capsys, view):
    everything = len(shown(run(RELAY, "--json")[1]))
    assert main(["inspect", RELAY, "--rank", "7", *view]) == 0
    assert capsys.readouterr().err == f"none of {everything} frames is what --kind and --rank ask for\n"


def test_what_is_filtered_out_has_no_part_in_the_exit_code(run, tmp_path):
    bad = bytearray(CODEC.encode(ff.Heartbeat(1, 1)))
    bad[10] ^= 1
    path = capture(tmp_path / "c", [(0, "a", Direction.UP, bad), (1, "a", Direction.UP, CODEC.encode(ff.Exiting(2)))])
    assert run(path, *SALTED)[0] == 1
    code, out = run(path, *SALTED, "--kind", "exiting")
    assert code == 0
    assert out.splitlines()[1].split()[0] == "1"  # its number in the file


def test_a_limit_counts_what_is_shown(run):
    _, out = run(RELAY, *SALTED, "--json", "--kind", "batch", "--limit", 2)
    assert len(shown(out)) == 2
    assert "stopped after 2 frames (--limit)" in run(RELAY, *SALTED, "--kind", "batch", "--limit", 2)[1]


# ---------------------------------------------------------------------------------------------------------------- sums


def test_the_sums_of_real_traffic(run):
    code, out = run(RELAY, *SALTED, "--summary")
    assert code == 0
    (line,) = [line for line in out.splitlines() if re.match(r" +Timing Batch ", line)]
    assert line.split() == ["Timing", "Batch", "6", "318", "2", "2", "2"]
    assert "rank 0: 2, rank 1: 2, rank 2: 2" in out
    assert "host0: 4, host1: 2" in out
    assert "MAC: 192 ok, 10 none" in out
    assert "read as revision 0.7: the layout of an EpochAggregated" in out
    assert "348 packets, 10 TCP connections" in out


def test_the_sums_as_an_object(run):
    code, out = run(RELAY, *SALTED, "--summary", "--json")
    (found,) = shown(out)
    assert code == 0
    for table in ("kinds", "legs"):
        assert found["frames"] == sum(row["frames"] for row in found[table])
        assert found["bytes"] == sum(row["bytes"] for row in found[table])
    kinds = {kind["frame"]: kind for kind in found["kinds"]}
    assert kinds["Timing Batch"]["ranks"] == {"0": 2, "1": 2, "2": 2}
    assert (found["revision"], found["reason"]) == ("0.7", "the layout of an EpochAggregated")
    (model,) = [r for r in found["rounds"] if (r["tier"], r["kind"]) == ("ranks", "Model")]
    assert model["sent"] == {"rank 0": 2.0, "rank 1": 2.0, "rank 2": 2.0}
    assert (model["reply"], model["bytes"]) == (6.0, 32)
    assert all(r["seconds"] > 0 for r in found["rounds"])


def test_gaps_in_heartbeats(run, tmp_path):
    beats = [0, 1.0, 2.1, 5.0, 6.0, 7.6]
    hello = [(0, "rank 3 control", Direction.UP, CODEC.control_hello(3, 4))]
    up = [(t, "rank 3 control", Direction.UP, CODEC.encode(ff.Heartbeat(3, n))) for n, t in enumerate(beats)]
    down = [(t, "rank 3 control", Direction.DOWN, CODEC.encode(ff.CoordHeartbeat())) for t in (0, 1, 2)]
    path = capture(tmp_path / "c", sorted(hello + up + down, key=lambda frame: frame[0]))
    found = {name: (count, round(longest, 6), [(round(at, 6), round(s, 6)) for at, s in gaps])
             for name, count, longest, gaps in summarise(path).beats()}
    assert found == {"rank 3": (6, 2.9, [(2.1, 2.9), (6.0, 1.6)]), "coordinator to rank 3": (3, 1.0, [])}
    assert "2.9 s at 2.1 s, 1.6 s at 6.0 s" in run(path, "--summary")[1]


def test_rounds_by_leg_and_turn(tmp_path):
    def frame(kind, weight):
        return CODEC.encode_round(ff.RoundFrame([np.zeros(5, "f4")], kind, weight))

    control, model = ff.RoundKind.CONTROL, ff.RoundKind.MODEL
    up, down = Direction.UP, Direction.DOWN
    frames = [
        (0.0, "rank 0 data", up, frame(control, 0.0)), (0.5, "rank 1 data", up, frame(control, 0.0)),
        (0.6, "rank 0 data", down, frame(control, 0.0)), (0.7, "rank 0 data", up, frame(model, 3.0)),
        (0.8, "rank 1 data", down, frame(control, 0.0)), (0.9, "rank 1 data", up, frame(model, 4.0)),
        (1.0, "rank 0 data", down, frame(model, 7.0)), (1.2, "rank 1 data", down, frame(model, 7.0)),
    ]
    first, second = summarise(capture(tmp_path / "c", frames)).rounds
    assert (first.kind, first.sent, first.reply) == ("Control", {"rank 0": 0.0, "rank 1": 0.0}, 0.0)
    assert (second.kind, second.sent, second.reply) == ("Model", {"rank 0": 3.0, "rank 1": 4.0}, 7.0)
    assert (first.seconds, second.seconds, second.nbytes) == (0.8, 0.5, 20)


def test_macs_that_do_not_hold_are_named(run):
    code, out = run(RELAY, "--salt", "0" * 32, "--summary")
    assert code == 1
    assert "MACs that do not hold: 192, the first of them" in out
    found = shown(run(RELAY, "--salt", "0" * 32, "--summary", "--json")[1])[0]
    assert found["macs"] == {"none": 10, "BAD": 192}
    assert len(found["bad"]) == 10


def test_sums_of_nothing_and_of_a_cut_file(run, tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert run(tmp_path / "f", "--summary") == (0, "0 frames, 0 bytes\n")
    (tmp_path / "f").write_bytes(CODEC.encode(ff.Exiting(1)) + b"\xc4\x17")
    code, out = run(tmp_path / "f", "--summary")
    assert code == 1
    assert "ERROR at byte 26, after 1 frame: " in out
    assert "1 frame, 26 bytes" in out


# ----------------------------------------------------------------------------------------------------------- following


def follow(path, *options):
    return subprocess.Popen(
        [*COMMAND, str(path), "--follow", *SALTED, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("kind", ["capture", "packets"])
def test_a_growing_file(tmp_path, kind):
    if kind == "capture":
        beats = [CODEC.encode(ff.Heartbeat(1, n)) for n in range(3)]
        capture(tmp_path / "f", [(n, "rank 1 control", Direction.UP, beat) for n, beat in enumerate(beats)])
    else:
        talk = Talk()
        beats = [CODEC.encode(ff.Heartbeat(1, n)) for n in range(3)]
        packets = [*talk.open(), talk.up(b"\xe3\x17\x0d\xf1"), *map(talk.up, beats)]
        (tmp_path / "f").write_bytes(pcap(packets))
    data = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(data[:-20])
    process = follow(tmp_path / "f", "--kind", "heartbeat", "--json")
    try:
        steps = [json.loads(process.stdout.readline())["step"] for _ in range(2)]
        with (tmp_path / "f").open("ab") as file:
            file.write(data[-20:])
        steps.append(json.loads(process.stdout.readline())["step"])
        process.send_signal(signal.SIGINT)
        assert (steps, process.wait(60), process.stderr.read()) == ([0, 1, 2], 130, b"")
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_shows_the_sums(tmp_path):
    (tmp_path / "f").write_bytes(CODEC.encode(ff.Exiting(1)))
    process = follow(tmp_path / "f")
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert b"Timing Exiting" in lines[1]
        time.sleep(0.3)  # it waits for more by now
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, b"")
        assert b"1 frame, 26 bytes: 1 Timing Exiting" in out
    finally:
        process.kill()


# ---------------------------------------------------------------------------------------------------------- appearance


def on_a_terminal(*argv, **environment):
    """What a command writes to a terminal of 200 columns."""
    main_end, child_end = pty.openpty()
    env = {**os.environ, "COLUMNS": "200", "TERM": "xterm-256color", **environment}
    with subprocess.Popen([*COMMAND, *argv], stdout=child_end, stderr=subprocess.DEVNULL, env=env) as process:
        os.close(child_end)
        out = b""
        while True:
            try:
                piece = os.read(main_end, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not piece:
                break
            out += piece
    os.close(main_end)
    return process.returncode, out.decode()


def test_rich_on_a_terminal():
    pytest.importorskip("rich")
    code, out = on_a_terminal(RELAY, *SALTED, "--kind", "batch")
    assert code == 0
    assert "\x1b[32mok" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out).replace("\r\n", "\n")
    done = subprocess.run([*COMMAND, RELAY, *SALTED, "--kind", "batch"], capture_output=True, timeout=60)
    assert [line.rstrip() for line in plain.splitlines()] == done.stdout.decode().splitlines()
    code, out = on_a_terminal(RELAY, *SALTED, "--summary")
    assert "━" in out or "─" in out


def test_no_color():
    pytest.importorskip("rich")
    _, out = on_a_terminal(RELAY, *SALTED, "--kind", "batch", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", out)


def test_names_on_the_wire_cannot_steer_a_terminal(tmp_path, run):
    path = capture(tmp_path / "c", [(0, "a\x1b[2J[red]", Direction.UP, CODEC.encode(ff.JoinReject("\x1b[2J[bold]x")))])
    for options in ([], ["--summary"]):
        assert "\x1b[2J" not in run(path, *options)[1]
        code, out = on_a_terminal(str(path), *options)
        assert code == 0
        assert "\x1b[2J" not in out
        assert "[red]" in out


def test_without_rich_a_hint_and_plain_text(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = run(RELAY, *SALTED)
    assert capsys.readouterr().err == ""  # no terminal, no hint
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    from flodl_fast.console import _hint

    _hint.cache_clear()
    code = main(["inspect", RELAY, *SALTED, "--summary"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "For colours and tables: pip install 'flodl_fast[cli]'\n")
    assert "Timing Batch" in captured.out
    assert main(["inspect", RELAY, *SALTED]) == 0
    assert capsys.readouterr().out == plain[1]


def test_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    code, _ = run(RELAY, *SALTED, "--plot", picture)
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capture(tmp_path / "c", [(0, "a", Direction.UP, CODEC.encode(ff.Exiting(1)))])
    assert run(tmp_path / "c", "--plot", tmp_path / "none.png")[0] == 1
    assert not (tmp_path / "none.png").exists()


def test_a_picture_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["inspect", RELAY, "--plot", str(tmp_path / "run.png")]) == 2
    assert capsys.readouterr() == ("", "matplotlib is not installed: pip install 'flodl_fast[plot]'\n")


def test_packets_through_a_pipe():
    with open(RELAY, "rb") as file:
        done = subprocess.run([*COMMAND, "-", *SALTED, "--json"], stdin=file, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.splitlines()) == len(list(inspect_frames(io.BytesIO(Path(RELAY).read_bytes()), salt=SALT)))

"""The command line, called and started: answers, tables, exit codes, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import reference as ref
from conftest import GOLDEN, SALT, golden, same
from support import CODEC, MESSAGE_FILES

import flodl_fast as ff
from flodl_fast._codec import sha256_kernel
from flodl_fast._round import fold_kernel
from flodl_fast.capture import CaptureWriter, Direction
from flodl_fast.cli import main

COMMAND = [sys.executable, "-m", "flodl_fast"]
SALT_HEX = SALT.hex()


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls main: run("encode", stdin=b"...") -> (exit code, standard output)."""

    def call(*argv, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return main([str(word) for word in argv]), capsys.readouterr().out

    return call


@pytest.fixture
def ask(run):
    """Sends questions to encode or decode, as JSON lines, and gives the answers."""

    def call(mode, questions):
        code, out = run(mode, stdin="".join(json.dumps(q) + "\n" for q in questions).encode())
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]

    return call


def start(*argv, **options):
    return subprocess.run([*COMMAND, *map(str, argv)], capture_output=True, timeout=60, **options)


def usage(capsys, *argv):
    """The message of a wrong use."""
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    assert caught.value.code == 2
    return capsys.readouterr().err


def outcome(answer):
    """An answer without what differs between two implementations: the words of errors, debug text."""
    if "error" in answer:
        return "error"
    return {name: value for name, value in answer.items() if name != "debug"}


# --------------------------------------------------------------------------------------------------- encode and decode


@pytest.mark.parametrize("name", MESSAGE_FILES)
def test_encode_gives_the_vectors(ask, name):
    cases = golden(name)
    answers = ask("encode", cases)
    for case, answer in zip(cases, answers, strict=True):
        if ref.one_byte_form(case["msg"]) and "null" not in json.dumps(case["msg"]):
            assert answer == {"payload": case["payload"], "frame": case["frame"]}
        else:  # The order of a map is the crate's own, and null stands for None and for NaN: the value decides.
            assert len(answer["frame"]) == len(case["frame"])
            kind, message, left = ref.decode_frame(bytes.fromhex(case["salt"]), bytes.fromhex(answer["frame"]))
            assert (kind, left) == (case["kind"], 0)
            assert same(ref.to_json(message), case["msg"])


@pytest.mark.parametrize("name", MESSAGE_FILES)
def test_decode_gives_the_vectors(ask, name):
    cases = golden(name)
    answers = ask("decode", cases)
    for case, answer in zip(cases, answers, strict=True):
        assert same(answer, {"kind": case["kind"], "msg": case["msg"], "left": 0})


def test_decode_gives_the_outcomes_of_damaged_frames(ask):
    cases = golden("mutated")
    answers = ask("decode", cases)
    for case, answer in zip(cases, answers, strict=True):
        if case["outcome"] == "message":
            assert (answer["kind"], answer["left"] >= 0) == (case["kind"], True)
            assert same(answer["msg"], case["msg"])
        else:
            assert set(answer) == {case["outcome"]}


SAID = {"salt": SALT_HEX, "kind": "Timing"}
QUESTIONS = [
    {**SAID, "msg": {"LrUpdate": {"rank": 2**64 - 1, "lr": 2**64}}},
    {**SAID, "msg": {"LrUpdate": {"rank": 2**64, "lr": 1}}},
    {**SAID, "msg": {"LrUpdate": {"rank": -1, "lr": 1}}},
    {**SAID, "msg": {"LrUpdate": {"rank": 1.0, "lr": 1}}},
    {**SAID, "msg": {"LrUpdate": {"rank": True, "lr": 1}}},
    {**SAID, "msg": {"LrUpdate": {"rank": 1, "lr": None}}},
    {**SAID, "msg": {"LrUpdate": {"rank": 1, "lr": -0.0, "more": []}}},
    {**SAID, "msg": {"LrUpdate": {"rank": 1}}},
    {**SAID, "msg": {"Unknown": {}}},
    {**SAID, "msg": {"Exiting": {"rank": 1}, "SnapshotReady": {"rank": 1}}},
    {**SAID, "msg": {"DashboardSetMetadata": {"rank": 1, "json": "\0é🦀"}}},
    {**SAID, "msg": {"SyncAck": {"rank": 1, "step_count": 2}}},
    {**SAID, "salt": f" {SALT_HEX.upper()} ", "msg": {"Exiting": {"rank": 1}}},
    {**SAID, "salt": SALT_HEX[1:], "msg": {"Exiting": {"rank": 1}}},
    {"salt": SALT_HEX, "kind": "Control", "msg": {"SyncNow": None}},
    {"salt": SALT_HEX, "kind": "Control", "msg": None},
    {"salt": SALT_HEX, "kind": "Heartbeat", "msg": []},
    {"salt": SALT_HEX, "kind": "Relay", "msg": "HelloAck"},
    {"salt": SALT_HEX, "kind": "Nonsense", "msg": "SyncNow"},
    {"salt": SALT_HEX, "kind": 2, "msg": {"Exiting": {"rank": 1}}},
    {**SAID},
    {"salt": None},
    {},
]


@pytest.mark.parametrize(("mode", "line", "error"), [
    ("encode", {}, "a line has salt, kind, msg; this one lacks salt, kind, msg"),
    ("encode", {"salt": SALT_HEX, "kind": "Control"}, "a line has salt, kind, msg; this one lacks msg"),
    ("decode", {"salt": SALT_HEX}, "a line has salt, frame; this one lacks frame"),
    ("decode", {"salt": SALT_HEX, "frame": None}, "frame must be text, got NoneType"),
])
def test_a_line_that_lacks_something_is_told_what(ask, mode, line, error):
    assert ask(mode, [line]) == [{"error": error}]


def test_encode_answers_as_the_crate_does(ask, peer):
    theirs, ours = peer("encode").ask_many(QUESTIONS), ask("encode", QUESTIONS)
    assert [outcome(answer) for answer in ours] == [outcome(answer) for answer in theirs]
    assert sum("error" in answer for answer in ours) == 17


def test_decode_answers_as_the_crate_does(ask, peer):
    frame = CODEC.encode(ff.Heartbeat(3, 1000)).hex()
    reserved = CODEC.encode(ff.Reserved(ff.MsgKind.PARAM_SNAPSHOT_META, b"\1\2")).hex()
    cut = ["", "c4", frame[:46], frame[:48], frame[:-2]]
    whole = [frame, frame.upper(), frame + "00ff", reserved, reserved + "00"]
    questions = [{"salt": SALT_HEX, "frame": f} for f in (*cut, *whole, "zz", "c4 17", 7, None)]
    questions += [{"salt": "0" * 32, "frame": frame}, {"salt": "", "frame": ""}, {"salt": SALT_HEX}]
    theirs, ours = peer("decode").ask_many(questions), ask("decode", questions)
    assert [outcome(answer) for answer in ours] == [outcome(answer) for answer in theirs]
    assert {"kind": "ParamSnapshotMeta", "payload": "0102", "left": 1} in ours


def test_numbers_are_read_as_serde_reads_them(run):
    def payload(rank, lr):
        line = f'{{"salt": "{SALT_HEX}", "kind": "Timing", "msg": {{"LrUpdate": {{"rank": {rank}, "lr": {lr}}}}}}}'
        _, out = run("encode", stdin=line.encode())
        return json.loads(out).get("payload")

    assert payload(1, 1) == "0301" + np.float64(1).tobytes().hex()
    assert payload(1, "-0") == "0301" + np.float64(-0.0).tobytes().hex()
    assert payload("-0", 1) is None
    for lr in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "9" * 5000):
        assert payload(1, lr) is None


def test_lines_that_are_no_json_are_answered_and_passed_over(run):
    good = json.dumps({"salt": SALT_HEX, "kind": "Control", "msg": "SyncNow"}).encode()
    lines = [good, b"", b"  \t", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, good + b"\r", good]
    code, out = run("encode", stdin=b"\n".join(lines))
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [list(answer) for answer in answers] == [["payload", "frame"], *[["error"]] * 5, *[["payload", "frame"]] * 2]
    named = [re.match(r"line (\d+) is not a JSON object: ", answer["error"]).group(1) for answer in answers[1:6]]
    assert named == ["4", "5", "6", "7", "8"]


def test_answers_never_hold_a_salt(ask):
    for mode, rest in (("encode", {"kind": "Control", "msg": "SyncNow"}), ("decode", {"frame": "00" * 40})):
        for salt in (SALT_HEX, SALT_HEX + "0", "g" + SALT_HEX[1:]):
            (answer,) = ask(mode, [{"salt": salt, **rest}])
            assert SALT_HEX[1:] not in str(answer.get("error"))


def test_a_program_can_ask_one_question_after_the_other():
    case = golden("timing")[0]
    with subprocess.Popen([*COMMAND, "decode"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for _ in range(3):
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()
            assert same(json.loads(process.stdout.readline())["msg"], case["msg"])
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("mode", ["encode", "decode"])
def test_started_with_a_file(mode):
    path = GOLDEN / "0.6" / "timing.jsonl"
    with path.open("rb") as file:
        done = start(mode, "--revision", "0.6", stdin=file)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, b"")
    for case, answer in zip(golden("timing"), answers, strict=True):
        if mode == "encode":
            assert answer == {"payload": case["payload"], "frame": case["frame"]}
        else:
            assert same(answer, {"kind": "Timing", "msg": case["msg"], "left": 0})


def test_the_examples_of_the_manual(run):
    manual = (GOLDEN.parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    examples = re.findall(r"\$ echo '(.*)' \\\n +\| python -m flodl_fast (\w+)\n(.*\n)", manual)
    assert [mode for _, mode, _ in examples] == ["encode", "decode"]
    for question, mode, answer in examples:
        assert run(mode, stdin=question.encode()) == (0, answer)


# ------------------------------------------------------------------------------------------------------------- inspect


ROUND = ff.RoundFrame([np.zeros((2, i), "f4") for i in range(6)], weight=3.0)
LEGS = [
    (CODEC.control_hello(1, 3), "rank 1 control", Direction.UP),
    (CODEC.encode(ff.StartEpoch(ff.EpochPlan(4, 0, 96))), "rank 1 control", Direction.DOWN),
    (CODEC.encode(ff.Batch(1, 12.5, 0.75, 42, None, 0.693)), "rank 1 control", Direction.UP),
    (CODEC.encode_round(ROUND), "rank 1 data", Direction.UP),
    (CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 2, CODEC.encode(ff.Heartbeat(2, 7)))), "host\x1b[1m", Direction.UP),
]


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "run.capture"
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for i, (frame, leg, direction) in enumerate(LEGS):
            writer.write(frame, leg, direction, time_ns=10**18 + i * 1_500_000)
    return path


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "stream"
    path.write_bytes(b"".join(frame for frame, *_ in LEGS))
    return path


def test_the_table_of_a_capture(run, recorded):
    code, out = run("inspect", recorded, "--salt", SALT_HEX)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["#", "offset", "time", "s", "leg", "way", "frame", "rank", "epoch", "step", "bytes",
                                "payload", "MAC"]
    assert lines[1].split() == ["0", "41", "0.000000", "rank", "1", "control", "up", "control", "hello", "1", "24",
                                "ok", "world=3"]
    assert lines[2].split()[3:] == ["rank", "1", "control", "down", "Control", "StartEpoch", "4", "28", "4", "ok",
                                    "partition_offset=0", "partition_size=96"]
    assert lines[3].split()[2:] == ["0.003000", "rank", "1", "control", "up", "Timing", "Batch", "1", "42", "53", "29",
                                    "ok", "batch_ms=12.5", "data_ms=0.75", "batch_loss=0.693"]
    assert lines[4].split()[-5:] == ["Model", "253", "120", "ok", "weight=3"]
    assert lines[5].strip() == (
        "6 tensors, 120 bytes: float32[2, 0], float32[2, 1], float32[2, 2], float32[2, 3], … and 2 more"
    )
    assert "'host\\x1b[1m'" in lines[6]
    assert lines[6].split()[-6:] == ["mux", "Data", "2", "52", "27", "ok"]
    assert lines[7].split()[1:] == ["Timing", "Heartbeat", "2", "7", "27", "3", "ok"]
    assert lines[8].startswith("5 frames, 410 bytes: 1 control hello, 1 Control StartEpoch, ")
    assert lines[9:] == ["MAC: 6 ok", "read as revision 0.6: as the capture says"]
    # Columns stand under their titles, numbers to the right.
    for title, text in (("rank", "1"), ("step", "42"), ("bytes", "53"), ("payload", "29")):
        end = lines[0].index(f" {title}") + len(title) + 1
        assert lines[3][:end].endswith(f" {text}")


def test_the_table_of_a_stream(run, stream):
    code, out = run("inspect", stream)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:4] == ["#", "offset", "frame", "rank"]
    offsets = [0]
    for frame, *_ in LEGS:
        offsets.append(offsets[-1] + len(frame))
    starts = [line.split()[:2] for line in lines[1:] if re.match(r" *\d+ +\d+ \w", line)]
    assert [s for s in starts if s[1].isdigit()] == [[str(i), str(at)] for i, at in enumerate(offsets[:-1])]
    assert out.count("not checked") == 7
    assert lines[-2:] == ["MAC: 6 not checked", "read as revision 0.6: 0.6 and 0.7 look alike so far"]


def test_objects_for_programs(run, recorded):
    code, out = run("inspect", "--json", "--salt", SALT_HEX, recorded)
    objects = [json.loads(line) for line in out.splitlines()]
    data = recorded.read_bytes()
    assert code == 0
    assert [found["index"] for found in objects] == [0, 1, 2, 3, 4]
    for found, (frame, leg, direction) in zip(objects, LEGS, strict=True):
        assert data[found["offset"] : found["offset"] + found["size"]] == frame
        assert (found["leg"], found["direction"]) == (leg, direction.name.lower())
        assert found["mac"] == "ok"
    assert objects[2]["msg"] == ff.to_json(CODEC.decode(LEGS[2][0]))
    assert objects[3]["tensors"][1] == {"dtype": "float32", "shape": [2, 1], "nbytes": 8}
    assert (objects[4]["rank"], objects[4]["inner"]["name"]) == (2, "Heartbeat")


def test_from_standard_input(stream):
    with stream.open("rb") as file:
        done = start("inspect", "-", "--salt", SALT_HEX, stdin=file)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().splitlines()[-2].startswith("MAC: 6 ok")


def test_a_salt_from_a_file(run, stream, tmp_path, capsys):
    (tmp_path / "salt").write_text(f" {SALT_HEX.upper()}\n")
    code, out = run("inspect", stream, "--salt-file", tmp_path / "salt")
    assert (code, out.splitlines()[-2]) == (0, "MAC: 6 ok")
    both = ["--salt", SALT_HEX, "--salt-file", str(tmp_path / "salt")]
    assert "not allowed with" in usage(capsys, "inspect", "f", *both)


def test_another_salt(run, stream):
    code, out = run("inspect", stream, "--salt", "0" * 32)
    assert (code, out.splitlines()[-2]) == (1, "MAC: 6 BAD")
    assert "batch_loss=0.693" in out


def test_a_limit(run, stream):
    code, out = run("inspect", stream, "--limit", 2)
    assert code == 0
    assert "stopped after 2 frames (--limit)" in out.splitlines()
    assert "Batch" not in out
    assert len(run("inspect", stream, "--json", "--limit", 2)[1].splitlines()) == 2
    assert "stopped" not in run("inspect", stream, "--limit", 6)[1]


def test_a_cut_file_shows_what_it_holds_and_where_it_ends(run, stream, recorded):
    for path, offset in ((stream, sum(len(frame) for frame, *_ in LEGS[:-1])), (recorded, 480)):
        path.write_bytes(path.read_bytes()[:-5])
        code, out = run("inspect", path)
        assert code == 1
        assert "Timing Batch" in out
        (line,) = [line for line in out.splitlines() if line.startswith("ERROR")]
        assert line.startswith(f"ERROR at byte {offset}, after 4 frames: ")
        assert "52 bytes" in line
        code, out = run("inspect", path, "--json")
        *_, last = [json.loads(line) for line in out.splitlines()]
        assert code == 1
        assert (last["index"], last["offset"]) == (4, offset)
        assert "52 bytes" in last["error"]


def test_a_fault_in_a_frame_is_shown_below_it(run, tmp_path):
    (tmp_path / "f").write_bytes(
        bytes.fromhex("f1170df10100000000000000000000f03f000102000000040000000000000000000000f2d76c7af37036b5")
    )
    code, out = run("inspect", tmp_path / "f", "--salt", SALT_HEX)
    assert code == 1
    assert re.fullmatch(r" +FAULT: .*tensor 0.*", out.splitlines()[2])


def test_a_given_framing(run, tmp_path):
    frame = CODEC.encode(ff.SyncNow())
    (tmp_path / "f").write_bytes(len(frame).to_bytes(4, "little") + frame)
    assert run("inspect", tmp_path / "f", "--framing", "prefixed-control")[0] == 0
    code, out = run("inspect", tmp_path / "f", "--framing", "control")
    assert (code, out.splitlines()[0][:40]) == (1, "ERROR at byte 0, after 0 frames: expecte")


def test_an_empty_file(run, tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert run("inspect", tmp_path / "f") == (0, "0 frames, 0 bytes\n")


def test_a_salt_inside_a_message_stays_out_of_the_table(run, tmp_path):
    (tmp_path / "f").write_bytes(
        CODEC.encode(ff.JoinAccept([0], SALT_HEX, 30)) + CODEC.encode(ff.JoinWorldFormed(SALT_HEX, SALT_HEX))
    )
    _, out = run("inspect", tmp_path / "f")
    assert SALT_HEX[:8] not in out
    assert out.count("_hex=<32 digits>") == 3


def test_a_terminal_gets_lines_of_its_width(run, stream, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    whole = run("inspect", stream)[1].splitlines()
    assert max(map(len, whole)) > 110
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for cut, line in zip(run("inspect", stream)[1].splitlines(), whole, strict=True):
        if "batch_loss" in line:
            assert len(cut) == 110
            assert cut == line[:109] + "…"


def test_a_character_that_the_output_lacks_is_no_reason_to_stop(stream):
    done = start("inspect", stream, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert b"\\u2026 and 2 more" in done.stdout


# ---------------------------------------------------------------------------------------------------- info, use and end


def test_info(run):
    code, out = run("info")
    assert code == 0
    for text in (ff.__version__, "0.6", sha256_kernel()[0], fold_kernel()[0], np.__version__, sys.version.split()[0]):
        assert text in out
    code, out = run("info", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["version"] == ff.__version__
    assert found["revisions"] == ["0.6", "0.7", "0.8"]
    assert (found["sha256"]["kernel"], found["sha256"]["available"]) == sha256_kernel()
    assert (found["fold"]["kernel"], found["fold"]["available"]) == fold_kernel()
    assert (found["numpy"], found["python"]) == (np.__version__, sys.version.split()[0])


def test_help_and_version(capsys):
    for argv, text in (("--help", "inspect"), ("inspect --help", "--salt-file"), ("--version", ff.__version__)):
        with pytest.raises(SystemExit) as caught:
            main(argv.split())
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["inspect"], "FILE"),
        (["inspect", "f", "--framing", "tcp"], "prefixed-round"),
        (["inspect", "f", "--limit", "0"], "expected a positive number, got '0'"),
        (["inspect", "f", "--limit", "two"], "expected a positive number, got 'two'"),
        (["inspect", "f", "--revision", "0.5"], "0.6"),
        (["encode", "--revision", "0.5"], "0.6"),
        (["inspect", "f", "--salt-file", "does-not-exist"], "cannot read a salt"),
    ],
)
def test_wrong_use(capsys, argv, text):
    assert text in usage(capsys, *argv)


def test_a_wrong_salt_is_not_repeated(capsys, tmp_path):
    (tmp_path / "salt").write_text("g" + SALT_HEX[1:])
    for option, value in (("--salt", "g" + SALT_HEX[1:]), ("--salt-file", str(tmp_path / "salt"))):
        err = usage(capsys, "inspect", "f", option, value)
        assert "32 hex digits" in err
        assert SALT_HEX[1:] not in err


def test_a_file_that_cannot_be_read(run, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "missing"):
        assert main(["inspect", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def test_a_reader_that_has_seen_enough(stream):
    stream.write_bytes(stream.read_bytes() * 2000)
    with stream.open("rb") as file, subprocess.Popen(
        [*COMMAND, "inspect", "-"], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert b"offset" in process.stdout.readline()
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (0, b"")


def test_an_interrupt_ends_quietly(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("flodl_fast.report.inspect_frames", interrupted)
    assert run("inspect", __file__) == (130, "")


def test_demo_is_loaded_for_itself_alone(monkeypatch):
    demo = types.ModuleType("flodl_fast.demo")
    demo.add_arguments = lambda parser: parser.add_argument("--epochs", type=int)
    demo.run = lambda args: args.epochs
    monkeypatch.setitem(sys.modules, "flodl_fast.demo", demo)
    monkeypatch.setattr(ff, "demo", demo, raising=False)
    assert main(["demo", "--epochs", "3"]) == 3
    code = "import sys, flodl_fast.cli as c; c.main(['info']); sys.exit('flodl_fast.demo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0

"""top: what it makes of a controller's status page, live, once and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from channel_support import nobody_listens

from flodl_fast import status
from flodl_fast.cli import main
from flodl_fast.status import LARGEST, fetch_state

COMMAND = [sys.executable, "-m", "flodl_fast", "top"]
WAITING = {  # the page as docs/wire.md §7 has it
    "phase": "waiting", "joined_ranks": 2, "joined_hosts": 1, "min_rank_start": 3, "target_ranks": None,
    "window_remaining_secs": 21, "cap_remaining_secs": 51, "members": [
        {
            "host": "a", "ranks": [0, 1], "local_devices": [0, 1], "gpus": ["RTX \x1b[2J"], "libtorch": "2.9",
            "joined_at_secs": 3,
        },
    ],
}
JOINED = "2 of at least 3 ranks on 1 host(s)"
TRAINING = {**WAITING, "phase": "training", "joined_ranks": 3}
STAGING = {**WAITING, "phase": "staging", "start_mode": "manual", "start_armed": False}


@contextmanager
def controller(*pages, status=200):
    """A controller that shows these pages one after the other, the last for good; None is a 503."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page = left.pop(0) if len(left) > 1 else left[0]
            body = page if isinstance(page, bytes) else json.dumps(page).encode()
            self.send_response(503 if page is None else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setattr(status, "PATIENCE", 60)

    def call(*argv):
        code = main(["top", *argv])
        return code, *capsys.readouterr()

    return call


def test_once(run):
    with controller(WAITING) as address:
        code, out, err = run(address, "--once")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == f"waiting: {JOINED}; at the last change window open 21 s, gives up in 51 s"
    assert lines[-1].split() == ["a", "0,", "1", "0,", "1", r"'RTX", r"\x1b[2J'", "2.9", "3"]


def test_until_the_run_is_over(run):
    done = {**TRAINING, "phase": "done"}
    with controller(None, WAITING, WAITING, TRAINING, done) as address:
        code, out, _ = run(address, "--interval", "0.01")
    heads = [line.partition(":")[0] for line in out.splitlines() if "rank" in line and "host(s)" in line]
    assert (code, heads) == (0, ["waiting", "training", "done"])  # what is the same is not said again
    assert out.startswith("the controller is up and has published nothing yet\n")


def test_a_run_that_failed(run):
    with controller(TRAINING, {**TRAINING, "phase": "failed"}) as address:
        assert run(address, "--interval", "0.01")[0] == 1


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, ", start manual, not given yet; at the last change window open 21 s, gives up in 51 s"),
        (
            {"start_armed": True, "window_remaining_secs": None},
            ", start manual, given; at the last change gives up in 51 s",
        ),
        ({"start_mode": "auto"}, "; at the last change window open 21 s, gives up in 51 s"),
        ({"phase": "forming"}, ""),
    ],
)
def test_what_0_8_adds(run, told, said):
    page = {**STAGING, **told}
    with controller(page) as address:
        line = run(address, "--once")[1].splitlines()[0]
    assert line == f"{page['phase']}: {JOINED}{said}"


def test_a_page_that_would_steer_the_terminal(run):
    with controller({**WAITING, "phase": "\x1b[2J"}) as address:
        assert run(address, "--once")[1].splitlines()[0] == rf"'\x1b[2J': {JOINED}"


@pytest.mark.parametrize("depth", [1, 600])
def test_what_is_nested_is_not_looked_into(run, depth):
    member = b'{"gpus": [7, null, %s], "host": %s1%s}' % (b"[" * depth + b"]" * depth, b'{"a":' * depth, b"}" * depth)
    page = json.dumps({**STAGING, "members": ["@"], "target_ranks": [[2]], "start_mode": {}}).encode()
    with controller(page.replace(b'"@"', member)) as address:
        code, out, err = run(address, "--once")
    assert (code, err) == (0, "")
    assert out.startswith("staging: 2 of … ranks on 1 host(s), start …, not given yet; ")
    assert out.splitlines()[-1].split() == ["…", "7,", "…"]


def test_objects_for_programs(run):
    with controller(None, WAITING, {**WAITING, "phase": "done"}) as address:
        code, out, _ = run(address, "--json", "--interval", "0.01")
        assert fetch_state(("127.0.0.1", int(address.split(":")[1])))["phase"] == "done"
    pages = [json.loads(line) for line in out.splitlines()]
    assert (code, pages) == (0, [None, WAITING, {**WAITING, "phase": "done"}])


def test_nobody_there(run):
    with nobody_listens() as (host, port):
        address = f"{host}:{port}"
        code, out, err = run(address, "--once")
    assert (code, out) == (1, "")
    assert err.startswith(f"flodl-fast top: error: no status at {address}: ")


@pytest.mark.parametrize(
    "page",
    [
        b"<html>", b"[1]", b"{}", b'{"error": "not found"}', b"[" * 100_000, b" " * (LARGEST + 1),
        *(json.dumps({**WAITING, **wrong}).encode() for wrong in (
            {"phase": 1}, {"members": 5}, {"members": [5]}, {"cap_remaining_secs": float("nan")}, {"x": [float("inf")]},
        )),
    ],
)  # fmt: skip
def test_somebody_else_there(run, page):
    with controller(page) as address:
        code, _, err = run(address, "--once")
    assert code == 1
    assert "no status at" in err


def test_a_controller_that_goes(run):
    with controller(WAITING) as address, subprocess.Popen(
        [*COMMAND, address, "--json", "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert json.loads(process.stdout.readline()) == WAITING
        gone = process
    assert gone.returncode == 0
    # Both ends are closed by then: what it said is in its pipe.


def test_drawn_by_rich(run, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with controller(WAITING, {**TRAINING, "phase": "done"}) as address:
        code, out, _ = run(address, "--interval", "0.01")
    assert code == 0
    assert "waiting: 2 of at least 3 ranks" in out
    assert "done: 3 of at least 3 ranks" in out
    assert "RTX \x1b" not in out


def test_a_terminal_that_cannot_draw_gets_plain_text(run, monkeypatch):
    pages = WAITING, {**TRAINING, "phase": "done"}
    with controller(*pages) as address:
        plain = run(address, "--interval", "0.01")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with controller(*pages) as address:
        assert run(address, "--interval", "0.01") == plain
    assert plain[1].startswith("waiting: 2 of at least 3 ranks")


@pytest.mark.parametrize(
    "argv", [[], ["host"], ["host:0"], ["host:x"], ["h:1", "--interval", "0"], ["h:1", "--interval", "nan"]]
)
def test_wrong_use(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["top", *argv])
    assert caught.value.code == 2
    assert "usage: flodl-fast top" in capsys.readouterr().err

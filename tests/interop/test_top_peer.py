"""top, and what join tells while it waits, against the status page that the crate's own server gives of real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from urllib.request import urlopen

import pytest
from test_join_peer import RANK, agent
from worker_support import WAIT, Stack, until

from flodl_fast import __version__, status
from flodl_fast.cli import main
from flodl_fast.join import Exit
from flodl_fast.status import fetch_state

# The agent, looking at the page without the pauses.
EAGER = [
    sys.executable, "-c",
    f"from flodl_fast import cli, join, status; join.STATUS_EVERY, status.PATIENCE = 0.05, {WAIT}; "
    "raise SystemExit(cli.main())",
]  # fmt: skip


@pytest.fixture
def top(capsys, monkeypatch):
    monkeypatch.setattr(status, "PATIENCE", WAIT)

    def call(stack, *options):
        code = main(["top", "{}:{}".format(*stack.controller), *options])
        return code, *capsys.readouterr()

    return call


def member(host: str, ranks: list[int], devices: list[int]) -> dict[str, object]:
    return {
        "host": host, "ranks": ranks, "local_devices": devices, "gpus": [f"device {device}" for device in devices],
        "libtorch": f"none, flodl_fast {__version__}",
    }  # fmt: skip


def timeless(state):
    """The page without its seconds, which must be whole ones and not below zero."""
    told = dict(state)
    seconds = [told.pop("window_remaining_secs"), told.pop("cap_remaining_secs")]
    told["members"] = [dict(each) for each in told["members"]]
    seconds += [each.pop("joined_at_secs") for each in told["members"]]
    assert all(type(value) is int and value >= 0 for value in seconds)
    return told


def eager(stack, revision, *options):
    """The agent of host "a"."""
    where = "{}:{}".format(*stack.controller)
    command = [*EAGER, "join", where, "--revision", revision, "--host", "a", *options, "--", sys.executable, "-c", RANK]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def hear(process, text):
    """Read what it says up to a line with this."""
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"it has not said {text!r}")


def published(stack, ranks):
    """Wait until the page tells of so many ranks."""
    until(lambda: (fetch_state(stack.controller) or {}).get("joined_ranks") == ranks)


def test_a_run_from_its_window_to_its_end(peer_build, top, revision):
    later = {"start_mode": "auto", "start_armed": False} if revision == "0.8" else {}
    page = {
        "phase": "waiting", "joined_ranks": 0, "joined_hosts": 0, "min_rank_start": 3, "target_ranks": 3,
        "members": [], **later,
    }  # fmt: skip
    first, second = member("a", [0, 1], [0, 1]), member("b", [2], [0])
    options = "--join", "--ranks", 3, "--samples", 96, "--epochs", 1, "--window", 120, "--stay"
    with Stack(peer_build(revision), *options, revision=revision) as stack:
        published(stack, 0)
        code, out, err = top(stack, "--once", "--json")
        assert (code, timeless(json.loads(out)), err) == (0, page, "")
        assert top(stack, "--once") == (
            0, "waiting: 0 of 3 ranks on 0 host(s); at the last change window open 120 s, gives up in 240 s\n", ""
        )  # fmt: skip
        with eager(stack, revision, "--devices", "0,1") as one:
            hear(one, "waiting: 2 of 3 ranks on 1 host(s); at the last change window open ")
            code, out, _ = top(stack, "--once", "--json")
            assert timeless(json.loads(out)) == {**page, "joined_ranks": 2, "joined_hosts": 1, "members": [first]}
            with agent(stack.controller[1], "b", "--revision", revision) as other:
                code, out, err = top(stack, "--json", "--interval", "0.05")
                told = one.communicate(timeout=WAIT), other.communicate(timeout=WAIT)
        assert (one.returncode, other.returncode) == (Exit.OK, Exit.OK), told
        pages = [timeless(json.loads(line)) for line in out.splitlines()]
        assert (code, err) == (0, "")
        assert pages[-1] == {
            **page, "phase": "done", "joined_ranks": 3, "joined_hosts": 2, "members": [first, second]
        }  # fmt: skip
        order = ["waiting", "forming", "training", "done"]
        phases = [order.index(each["phase"]) for each in pages]
        assert phases == sorted(phases)
        code, out, _ = top(stack, "--once")
        lines = out.splitlines()
        assert (code, lines[0]) == (0, "done: 3 of 3 ranks on 2 host(s)")
        assert [line.split()[:3] for line in lines[-2:]] == [["a", "0,", "1"], ["b", "2", "0"]]
    code, out, err = top(stack, "--once")
    assert (code, out) == (1, "")
    assert "error: no status at 127.0.0.1:" in err


def test_a_run_that_does_not_form(peer_build, top, revision):
    with Stack(peer_build(revision), "--join", "--ranks", 2, "--window", 1, "--stay", revision=revision) as stack:
        published(stack, 0)
        code, out, _ = top(stack, "--json", "--interval", "0.1")
        assert (code, json.loads(out.splitlines()[-1])["phase"]) == (1, "failed")
        assert top(stack, "--once") == (1, "failed: 0 of 2 ranks on 0 host(s)\n", "")


def test_a_start_that_is_held(peer_build, top):
    """0.8: the window stays open for a POST /start."""
    options = "--join", "--ranks", 2, "--samples", 64, "--epochs", 1, "--window", 120, "--start", "manual", "--stay"
    with Stack(peer_build("0.8"), *options, revision="0.8") as stack:
        with eager(stack, "0.8", "--devices", "0,1") as one:
            held = "staging: 2 of at least 2 ranks on 1 host(s), start manual, not given yet; at the last change "
            hear(one, held)
            assert top(stack, "--once")[1].startswith(held)
            with urlopen("http://{}:{}/start".format(*stack.controller), data=b"") as answer:
                assert json.load(answer)["armed"] is True
            code, out, _ = top(stack, "--json", "--interval", "0.05")
            one.communicate(timeout=WAIT)
        assert one.returncode == Exit.OK
        last = json.loads(out.splitlines()[-1])
        assert (code, last["phase"], last["start_mode"], last["start_armed"]) == (0, "done", "manual", True)


def test_a_controller_without_a_window(peer_build, top, revision):
    with Stack(peer_build(revision), revision=revision) as stack:
        said = "the controller is up and has published nothing yet\n"
        assert top(stack, "--once") == (0, said, "")
        assert top(stack, "--once", "--json") == (0, "null\n", "")


def test_a_port_that_is_no_controllers(peer_build, top):
    """A relay's: it takes the request for a rank's handshake."""
    with Stack(peer_build("0.6")) as stack:
        stack.controller = stack.relays["data", 0]
        code, out, err = top(stack, "--once")
    assert (code, out) == (1, "")
    assert "error: no status at 127.0.0.1:" in err

"""The join agent against a window that follows a script: what it offers, starts, passes on, reports and ends with."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from channel_support import nobody_listens
from conftest import SALT
from local_support import AGENT
from worker_support import WAIT, Running, until

import flodl_fast as ff
from flodl_fast import join, protocol
from flodl_fast.channel import JoinChannel, accept
from flodl_fast.join import Exit

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the commands and signals of these tests are POSIX")

OPEN = ff.Codec(bytes(16))
CODEC = ff.Codec(SALT)


class Window:
    """A join window that a test speaks for."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT)
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.pages: list[bytes] = []  # to serve as /state.json before an agent comes, or while it waits

    def admit(self, codec: ff.Codec = OPEN) -> tuple[JoinChannel, ff.JoinHello]:
        """The channel of the next agent, and its offer."""
        channel = accept(self._listener.accept()[0], codec, 1)
        try:
            return channel, channel.recv(WAIT)
        except ff.FlodlError:
            channel.close()
            raise

    def form(
        self,
        ranks: list[int] | None = None,
        *,
        salt: bytes | None = None,
        host: str = "node",
        wait: int = 60,
        revision: str = "0.6",
    ) -> tuple[JoinChannel, ff.JoinHello]:
        """Admit an agent and form its world; with a pre-shared salt if one is given."""
        channel, hello = self.admit(ff.Codec(bytes(16) if salt is None else salt, revision))
        ranks = list(range(len(hello.local_devices))) if ranks is None else ranks
        channel.send(ff.JoinAccept(ranks, SALT.hex() if salt is None else None, wait))
        channel.rekey(ff.Codec(SALT, revision))
        channel.send(ff.JoinWorldFormed(envelope(self.port, ranks, hello, host)))
        return channel, hello

    def serve_page(self) -> bytes:
        """Answer the next HTTP request; what it asked for."""
        with self._listener.accept()[0] as sock:
            request = sock.recv(1 << 16)
            sock.sendall(self.pages.pop(0))
        return request.split(b"\r\n")[0]

    def close(self) -> None:
        self._listener.close()


def envelope(port: int, ranks: list[int], hello: ff.JoinHello, host: str, world: int = 8) -> str:
    return json.dumps({
        "controller": {"host": "127.0.0.1", "port": port}, "world_size": world, "num_workers": 2, "salt": SALT.hex(),
        "worker": {
            "host": host, "ranks": ranks, "local_devices": list(hello.local_devices), "nccl_socket_ifname": "",
            "path": "/p",
        },
    }).encode().hex()  # fmt: skip


@pytest.fixture
def window():
    window = Window()
    yield window
    window.close()


def parse(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    return parser.parse_args(args)


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-c", textwrap.dedent(code)]


def joining(window: Window, script: Callable[[], Any], *args: str) -> tuple[int, Any]:
    """Run an agent in this process against the script; its exit code, and what the script returns."""
    playing = Running(script)
    code = join.run(parse(window.address, "--host", "node", *args))
    return code, playing.result()


def reports(channel: JoinChannel) -> dict[int, int]:
    """The exit codes that the agent reports until it hangs up."""
    codes = {}
    try:
        while True:
            message = channel.recv(WAIT)
            codes[message.rank] = message.code
    except ff.ChannelClosed:
        return codes


# ---------------------------------------------------------------------------------------------------------- the run


def test_offer_environment_output_and_exit_codes(window, capfd, monkeypatch):
    monkeypatch.setenv("FLODL_INTERNAL_RELAY_JSON", "another role's")
    monkeypatch.setenv("FLODL_VERBOSITY", "2")
    show = """
        import json, os, sys
        names = ("FLODL_INTERNAL_LOCAL_RANK", "FLODL_HOST_NAME", "FLODL_FAST_ROUTE", "CUDA_VISIBLE_DEVICES",
                 "CUDA_DEVICE_ORDER", "FLODL_VERBOSITY", "FLODL_INTERNAL_RELAY_JSON")
        print(json.dumps([os.environ.get(name) for name in names]))
        print(json.loads(bytes.fromhex(os.environ["FLODL_INTERNAL_CLUSTER_JSON"]))["worker"]["ranks"])
        print("a complaint", file=sys.stderr)
        print("what stdin has:", repr(sys.stdin.read()), end="")
    """

    def script() -> Any:
        channel, hello = window.form([3, 4])
        with channel:
            return hello, reports(channel)

    args = "--devices", "5,2", "--dataset-sig", "ab" * 32
    code, (hello, codes) = joining(window, script, *args, *python(show))
    assert code == Exit.OK
    assert codes == {3: 0, 4: 0}
    assert hello == ff.JoinHello(
        "node", bytes([5, 2]), ["device 5", "device 2"], f"none, flodl_fast {ff.__version__}", b"\xab" * 32
    )
    out, err = capfd.readouterr()
    for index, (rank, device) in enumerate(((3, 5), (4, 2))):
        lines = [line.partition("] ")[2] for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        values = [str(index), "node", "direct", str(device), "PCI_BUS_ID", "2", None]
        assert lines == [json.dumps(values), "[3, 4]", "what stdin has: ''"]
        assert f"[rank {rank}] a complaint\n" in err
    assert f"node offers 2 rank(s) to 127.0.0.1:{window.port}, dialled for up to 30 s" in err
    assert "admitted as rank 3, 4; waiting for the world, up to 60 s" in err
    assert "the world has formed" in err
    assert SALT.hex() not in out + err


LATER = "--run-id", "a run", "--nccl-version", "2.21.5", "--model-sig", "cd" * 32


@pytest.mark.parametrize("given", [(), LATER], ids=["nothing", "all"])
def test_an_offer_at_0_8(window, capfd, given):
    show = "import os; print(os.environ['FLODL_FAST_REVISION'])"

    def script() -> ff.JoinHello:
        channel, hello = window.form(revision="0.8")
        with channel:
            reports(channel)
        return hello

    code, hello = joining(window, script, "--revision", "0.8", *given, *python(show))
    assert code == Exit.OK
    told = (hello.run_id, hello.nccl_version, hello.model_sig)
    assert told == (("a run", (2, 21, 5), b"\xcd" * 32) if given else (None, None, None))
    assert "[rank 0] 0.8\n" in capfd.readouterr().out


@pytest.mark.parametrize("older", ["0.6", "0.7"])
@pytest.mark.parametrize(
    ("option", "field"), [(LATER[:2], "run_id"), (LATER[2:4], "nccl_version"), (LATER[4:], "model_sig")]
)
def test_what_an_older_revision_cannot_tell(window, capfd, older, option, field):
    assert join.run(parse(window.address, "--revision", older, *option, "--", "true")) == Exit.USAGE
    assert f"JoinHello.{field}" in capfd.readouterr().err


def test_pre_shared_salt(window, tmp_path):
    salt_file = tmp_path / "salt"
    salt_file.write_text(f" {SALT.hex().upper()}\n")

    def script() -> dict[int, int]:
        channel, _ = window.form(salt=SALT)
        with channel:
            return reports(channel)

    assert joining(window, script, "--salt-file", str(salt_file), "--", "true") == (Exit.OK, {0: 0})


def test_ranks_that_fail(window, capfd):
    def script() -> dict[int, int]:
        channel, _ = window.form()
        with channel:
            return reports(channel)

    rank = """
        import os, signal
        rank = os.environ["FLODL_INTERNAL_LOCAL_RANK"]
        if rank == "1":
            raise SystemExit(7)
        if rank == "2":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert joining(window, script, "--devices", "0,1,2", *python(rank)) == (Exit.RANK_FAILED, {0: 0, 1: 7, 2: -1})
    err = capfd.readouterr().err
    assert "rank 1 ended with code 7" in err
    assert "rank 2 ended by signal 9" in err


def test_much_output_on_both_streams_without_a_line_end(window, capfdbinary):
    def script() -> dict[int, int]:
        channel, _ = window.form()
        with channel:
            return reports(channel)

    rank = """
        import os, threading
        def write(fd):
            left = 3_000_000
            while left:
                left -= os.write(fd, b"x" * left)
        other = threading.Thread(target=write, args=(2,))
        other.start()
        write(1)
        other.join()
        os.write(1, b"\\nbytes \\xff\\r\\n\\n")
    """
    assert joining(window, script, *python(rank)) == (Exit.OK, {0: 0})
    out, err = capfdbinary.readouterr()
    assert out.count(b"x") == 3_000_000
    assert err.count(b"x" * 10_000) >= 250
    assert all(line.startswith(b"[rank 0] ") for line in out.splitlines())
    assert out.endswith(b"\n[rank 0] bytes \xff\n[rank 0] \n")


def test_output_that_nobody_takes(window):
    """A closed pipe behind the agent must not stop the rank."""
    command = [*AGENT, window.address, "--host", "node", *python("print('x' * 3_000_000); raise SystemExit(5)")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as agent:
        agent.stdout.close()
        channel, _ = window.form()
        with channel:
            assert reports(channel) == {0: 5}
        agent.wait(WAIT)


# ------------------------------------------------------------------------------------------------------------ the end

def stay(prepare: str = "") -> list[str]:
    """A rank that stays, with a process of its own that does too and holds its output open."""
    return python(f"""
        import signal, subprocess, sys, time
        {prepare}
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    """)


def test_an_exit_is_reported_though_the_output_stays_open(window, monkeypatch):
    monkeypatch.setattr(join, "DRAIN", 0.2)

    def script() -> dict[int, int]:
        channel, _ = window.form()
        with channel:
            assert channel.recv(WAIT) == ff.JoinRankExited(0, 0)
            return reports(channel)

    rank = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)'])"
    assert joining(window, script, *python(rank)) == (Exit.OK, {})


@pytest.mark.parametrize("deaf", [False, True], ids=["obeys", "has to be killed"])
def test_abort(window, capfd, monkeypatch, tmp_path, deaf):
    monkeypatch.setattr(join, "TERMINATE_GRACE", 0.5 if deaf else WAIT)

    def script() -> dict[int, int]:
        channel, _ = window.form()
        with channel:
            until(lambda: len(list(tmp_path.iterdir())) == 2)
            channel.send(ff.JoinRankExited(0, 0))  # of no meaning here
            channel.send(ff.JoinAbort("no quorum"))
            return reports(channel)

    ready = f"import tempfile; tempfile.mkstemp(dir={str(tmp_path)!r})"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else ""
    code, codes = joining(window, script, "--devices", "0,1", *stay(ignore + ready))
    assert (code, codes) == (Exit.ABORTED, {0: -1, 1: -1})
    err = capfd.readouterr().err
    assert "the controller gives the run up: no quorum" in err
    assert f"rank 1 ended by signal {9 if deaf else 15}" in err


def test_a_lost_controller_ends_ranks_that_stay(window, capfd, monkeypatch):
    monkeypatch.setattr(join, "LOST_GRACE", 0.3)

    def script() -> None:
        window.form()[0].close()

    code, _ = joining(window, script, *stay())
    assert code == Exit.LOST
    assert "the controller is gone: " in capfd.readouterr().err


@pytest.mark.parametrize(("code", "expected"), [(0, Exit.OK), (1, Exit.LOST)])
def test_a_lost_controller_lets_ranks_end(window, code, expected):
    """At the end of a run the controller may be gone before the last rank."""

    def script() -> None:
        window.form()[0].close()

    ended, _ = joining(window, script, *python(f"import time; time.sleep(0.5); raise SystemExit({code})"))
    assert ended == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_the_ranks_and_all_that_they_started(window, number, code):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT)
        held = f"import socket, time; s = socket.create_connection({listener.getsockname()}); time.sleep(600)"
        started = f"subprocess.Popen([sys.executable, '-c', {held!r}])"
        command = [*AGENT, window.address, "--host", "node", "--devices", "0,1", *stay(started)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as agent:
            channel, _ = window.form()
            with channel:
                holders = [listener.accept()[0] for _ in range(2)]
                agent.send_signal(number)
                assert reports(channel) == {0: -1, 1: -1}
            assert agent.wait(WAIT) == code
        for holder in holders:
            with holder:
                holder.settimeout(WAIT)
                assert holder.recv(1) == b""


def test_a_signal_while_it_waits_for_the_world(window):
    with subprocess.Popen([*AGENT, window.address, "--", "true"], stderr=subprocess.PIPE) as agent:
        channel, _ = window.admit()
        with channel:
            channel.send(ff.JoinAccept([0], SALT.hex(), 60))
            while b"waiting for the world" not in agent.stderr.readline():
                pass
            agent.send_signal(signal.SIGINT)
            assert agent.wait(WAIT) == 130


# ---------------------------------------------------------------------------------------------- admission and refusal


def test_rejection(window, capfd):
    def script() -> None:
        channel, _ = window.admit()
        with channel:
            channel.send(ff.JoinReject('host "node" is there already'))

    assert joining(window, script, "--", "true")[0] == Exit.REFUSED
    assert 'refused: host "node" is there already' in capfd.readouterr().err


@pytest.mark.parametrize("has_salt", [True, False])
def test_wrong_salt(window, capfd, tmp_path, has_salt):
    args = []
    if has_salt:
        (tmp_path / "salt").write_text("cd" * 16)
        args = ["--salt-file", str(tmp_path / "salt")]

    def script() -> None:
        with pytest.raises(ff.AuthenticationError):
            window.admit(CODEC)

    assert joining(window, script, *args, "--", "true")[0] == Exit.REFUSED
    err = capfd.readouterr().err
    assert "the session salt is wrong, this host uses " + ("that of --salt-file" if has_salt else "none") in err
    assert "cd" * 16 not in err


def test_an_answer_with_another_salt(window, capfd):
    def script() -> None:
        channel, _ = window.admit()
        with channel:
            channel.rekey(CODEC)
            channel.send(ff.JoinAccept([0], SALT.hex(), 60))
            with pytest.raises(ff.ChannelClosed):
                channel.recv(WAIT)

    assert joining(window, script, "--", "true")[0] == Exit.REFUSED
    assert "signed with another salt than none" in capfd.readouterr().err


def formed(envelope_hex: str) -> Callable[[ff.JoinHello], list[Any]]:
    return lambda hello: [ff.JoinAccept([0], SALT.hex(), 60), ff.JoinWorldFormed(envelope_hex)]


@pytest.mark.parametrize(
    ("answers", "code", "error"),
    [
        (lambda h: [ff.JoinAccept([0], None, 60)], Exit.REFUSED, "keeps the session salt: give --salt-file"),
        (lambda h: [ff.JoinAccept([0], "beef", 60)], Exit.LOST, "the controller's salt cannot be: a salt as text"),
        (lambda h: [ff.JoinAccept([0, 1], SALT.hex(), 60)], Exit.LOST, "1 devices .* admits ranks \\[0, 1\\]"),
        (lambda h: [h], Exit.LOST, "expected an answer, the controller sends a JoinHello"),
        (formed("zz"), Exit.LOST, "a world that cannot be: FLODL_INTERNAL_CLUSTER_JSON is not the hex"),
        (lambda h: formed(envelope(1, [2], h, "node"))(h), Exit.LOST, "admitted as rank 0, .* rank 2 in its place"),
        (lambda h: formed(envelope(1, [0], h, "other"))(h), Exit.LOST, "is for host 'other', this is 'node'"),
        (lambda h: [ff.JoinAccept([0], SALT.hex(), 60), h], Exit.LOST, "the world, the controller sends a JoinHello"),
        (
            lambda h: [ff.JoinAccept([0], SALT.hex(), 60), ff.JoinAccept([0], SALT.hex(), 60)],
            Exit.LOST, "the controller sends a JoinAccept",
        ),
        (
            lambda h: [ff.JoinAccept([0], SALT.hex(), 60), ff.JoinAbort("too few")],
            Exit.ABORTED, "the controller gives the run up: too few",
        ),
        (lambda h: [ff.JoinAccept([0], SALT.hex(), 60)], Exit.LOST, "the controller is gone: the peer has closed"),
    ],
)  # fmt: skip
def test_answers(window, capfd, answers, code, error):
    def script() -> None:
        channel, hello = window.admit()
        with channel:
            for answer in answers(hello):
                channel.send(answer)
                channel.rekey(CODEC)

    assert joining(window, script, "--", "false")[0] == code
    err = capfd.readouterr().err
    assert re.search(error, err)
    assert SALT.hex() not in err


def test_another_protocol(window, capfd):
    def script() -> None:
        with window._listener.accept()[0] as sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.recv(1 << 16)

    assert joining(window, script, "--", "true")[0] == Exit.LOST
    assert "not from a flodl controller" in capfd.readouterr().err


def test_an_answer_that_breaks_off(window, capfd):
    """It is no refusal, and nothing is wrong with the salt."""

    def script() -> None:
        with window._listener.accept()[0] as sock:
            sock.sendall(OPEN.encode(ff.JoinAccept([0], SALT.hex(), 60))[:30])
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass

    assert joining(window, script, "--", "true")[0] == Exit.LOST
    err = capfd.readouterr().err
    assert "the controller's answer breaks off: the peer has closed the channel 30 bytes into a frame" in err
    assert "salt" not in err


def test_an_answer_that_does_not_come(window, capfd, monkeypatch):
    monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", "0.1")
    monkeypatch.setattr("flodl_fast.protocol.JOIN_REPLY", 10)

    def script() -> None:
        channel, _ = window.admit()
        with channel, pytest.raises(ff.ChannelClosed):
            channel.recv(WAIT)

    assert joining(window, script, "--", "true")[0] == Exit.TIMED_OUT
    assert "has not answered in 1 s" in capfd.readouterr().err


def test_nobody_there(capfd, monkeypatch):
    monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", "0.1")
    with nobody_listens() as (_, port):
        assert join.run(parse(f"127.0.0.1:{port}", "--", "true")) == Exit.TIMED_OUT
    assert f"127.0.0.1:{port} did not answer in 6 attempts" in capfd.readouterr().err


def test_a_world_that_does_not_form(window, capfd, monkeypatch):
    monkeypatch.setattr(protocol, "FORMATION_MARGIN", 0.4)

    def script() -> None:
        channel, _ = window.admit()
        with channel:
            channel.send(ff.JoinAccept([0], SALT.hex(), 0))
            with pytest.raises(ff.ChannelClosed):
                channel.recv(WAIT)

    assert joining(window, script, "--", "true")[0] == Exit.TIMED_OUT
    assert "the world has not formed in time" in capfd.readouterr().err


def test_what_is_shown_until_the_world_forms(window, capfd, monkeypatch):
    monkeypatch.setattr(join, "STATUS_EVERY", 0.05)
    monkeypatch.setattr(join, "SAY_EVERY", math.inf)
    state = {"phase": "waiting", "joined_ranks": 1, "joined_hosts": 1, "min_rank_start": 2, "target_ranks": 3}
    state["members"] = []
    ok = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    window.pages = [
        ok + json.dumps(state).encode(),
        ok + json.dumps(state).encode(),
        ok + json.dumps({**state, "joined_ranks": 2, "joined_hosts": 2, "target_ranks": None}).encode(),
        ok + json.dumps({**state, "phase": "staging", "start_mode": "manual", "start_armed": False}).encode(),
        ok + json.dumps({**state, "phase": "staging", "start_mode": "hybrid", "start_armed": True}).encode(),
        ok + json.dumps({**state, "start_mode": "auto", "start_armed": False}).encode(),
        b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n",
    ]

    def script() -> list[bytes]:
        channel, _ = window.admit()
        with channel:
            channel.send(ff.JoinAccept([0], SALT.hex(), 600))
            channel.rekey(CODEC)
            asked = [window.serve_page() for _ in range(7)]
            channel.send(ff.JoinAbort("too few"))
            return asked

    code, asked = joining(window, script, "--", "true")
    assert code == Exit.ABORTED
    assert asked == [b"GET /state.json HTTP/1.1"] * 7
    said = [line.partition("join: ")[2] for line in capfd.readouterr().err.splitlines()]
    assert [line.partition("; waits")[0] for line in said[2:]] == [
        "waiting: 1 of 3 ranks on 1 host(s)",
        "waiting: 2 of at least 2 ranks on 2 host(s)",
        "staging: 1 of 3 ranks on 1 host(s), start manual, not given yet",
        "staging: 1 of 3 ranks on 1 host(s), start hybrid, given",
        "waiting: 1 of 3 ranks on 1 host(s)",
        "still waiting",
        "the controller gives the run up: too few",
    ]


# ------------------------------------------------------------------------------------------------------- command line


def test_a_command_that_does_not_exist(window, capfd):
    assert join.run(parse(window.address, "--", "no-such-command-here")) == Exit.USAGE
    assert "there is no command 'no-such-command-here'" in capfd.readouterr().err


def test_a_command_that_cannot_be_started(window, capfd, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)

    def script() -> dict[int, int]:
        channel, _ = window.form()
        with channel:
            return reports(channel)

    assert joining(window, script, "--", str(broken))[0] == Exit.USAGE
    assert "rank 0 cannot be started: " in capfd.readouterr().err


@pytest.mark.parametrize("order", [("{at}", "--host", "h"), ("--host", "h", "{at}")])
def test_command_keeps_its_own_options(order):
    command = ["run", "--host", "x", "--", "y"]
    args = parse(*(word.format(at="[::1]:4000") for word in order), "--", *command)
    assert args.controller == ("::1", 4000)
    assert args.host == "h"
    assert join._command(args) == command


def test_defaults(monkeypatch):
    monkeypatch.setenv("FLODL_HOST_NAME", "named")
    args = parse("localhost:1", "--", "run")
    assert (args.host, args.devices, args.salt, args.dataset_sig) == ("named", b"\0", None, bytes(32))
    assert (args.revision, args.run_id, args.nccl_version, args.model_sig) == ("0.6", None, None, None)
    monkeypatch.delenv("FLODL_HOST_NAME")
    assert parse("localhost:1", "--", "run").host == socket.gethostname()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["localhost", "--", "x"], "expected HOST:PORT, got 'localhost'"),
        ([":1", "--", "x"], "expected HOST:PORT"),
        (["h:65536", "--", "x"], "expected HOST:PORT"),
        (["http://h:1", "--", "x"], "expected HOST:PORT, got 'http://h:1'"),
        (["h:1"], "required: COMMAND"),
        (["h:1", "--devices", "1,01", "--", "x"], "expected different numbers from 0 to 255"),
        (["h:1", "--devices", "256", "--", "x"], "expected different numbers from 0 to 255"),
        (["h:1", "--devices", "", "--", "x"], "expected different numbers from 0 to 255"),
        (["h:1", "--dataset-sig", "abc", "--", "x"], "expected 64 hex digits, got 'abc'"),
        (["h:1", "--model-sig", "abc", "--", "x"], "expected 64 hex digits, got 'abc'"),
        (["h:1", "--nccl-version", "2.21", "--", "x"], "expected three numbers with points between, got '2.21'"),
        (["h:1", "--revision", "0.5", "--", "x"], "invalid choice: '0.5'"),
        (["h:1", "--salt-file", "/no/such/file", "--", "x"], "cannot read a salt from /no/such/file: "),
    ],
)
def test_wrong_use(capsys, args, error):
    with pytest.raises(SystemExit) as end:
        parse(*args)
    assert end.value.code == Exit.USAGE
    assert error in capsys.readouterr().err


def test_a_bad_salt_is_not_shown(capsys, tmp_path):
    (tmp_path / "salt").write_text("0123456789abcdef" * 2 + "0")
    with pytest.raises(SystemExit):
        parse("h:1", "--salt-file", str(tmp_path / "salt"), "--", "x")
    err = capsys.readouterr().err
    assert "32 hex digits" in err
    assert "0123456789" not in err


def test_help_tells_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    out = capsys.readouterr().out
    assert "HOST:PORT [options] -- COMMAND ..." in out
    for code in Exit:
        assert f"\n  {code.value}  " in out

"""``python -m flodl_fast join``: an agent that brings this host's ranks into a cluster (docs/cluster.md).

It offers the host's devices to the join window of a flodl controller, waits for the world, starts a command for each
rank and looks after those processes until they end (docs/wire.md §4, §7, §8). Its ranks dial the controller directly.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

from . import protocol
from .channel import Address, JoinChannel
from .cli import REVISIONS, salt_file
from .environment import CLUSTER, HOST_NAME, LOCAL_RANK, REVISION, ROUTE, Environment
from .errors import (
    AuthenticationError,
    ChannelClosed,
    ChannelError,
    DecodeError,
    EncodeError,
    FlodlError,
    HandshakeError,
)
from .frames import Codec
from .messages import (
    JoinAbort,
    JoinAccept,
    JoinHello,
    JoinRankExited,
    JoinReject,
    JoinWorldFormed,
    Message,
    RelayMsg,
)
from .net import Deadlines, scaled
from .status import address, fetch_state, headline

__all__ = ["Exit", "add_arguments", "run"]

STATUS_EVERY = 5.0  # seconds between two looks at the controller's status page
SAY_EVERY = 30.0  # seconds between two lines that say the same
LOST_GRACE = 10.0  # seconds for ranks to end by themselves once the controller is gone
TERMINATE_GRACE = 10.0  # seconds from asking a rank to end to making it
DRAIN = 5.0  # seconds for the output of ranks that have ended, which their own children may hold open
LINE = 1 << 16  # bytes of output without a line end that are passed on at once


class Exit(IntEnum):
    """The agent's exit codes; 128 plus its number where a signal ended it."""

    OK = 0
    RANK_FAILED = 1
    USAGE = 2
    REFUSED = 3
    TIMED_OUT = 4
    ABORTED = 5
    LOST = 6


_EXIT_CODES = """\
exit codes:
  0  every rank ended with code 0
  1  a rank did not
  2  wrong use, or a command that cannot be started
  3  the controller refuses this host, or the salt is wrong
  4  nobody answers, or the world does not form in time
  5  the controller gives the run up
  6  the controller is gone, or speaks otherwise
  128 + n  ended by signal n, such as 130 for Ctrl-C
"""


class _Stop(Exception):
    """The agent ends, for this reason and with this exit code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class _Ended(NamedTuple):
    """A rank's process has ended; the code is negative where a signal did it."""

    rank: int
    code: int


_Events = SimpleQueue["_Ended | _Stop"]


# ----------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the agent's options to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s HOST:PORT [options] -- COMMAND ..."
    parser.epilog = _EXIT_CODES
    parser.add_argument("controller", type=address, metavar="HOST:PORT", help="where the controller listens")
    # Not "+", for which some Pythons take a "--" of the command's own away.
    parser.add_argument(
        "command", nargs=argparse.PARSER, metavar="COMMAND", help="what to start for each rank, with its arguments"
    )
    parser.add_argument(
        "--host",
        default=os.environ.get(HOST_NAME) or socket.gethostname(),
        help="this host's name in the cluster, its own there (default: %(default)s)",
    )
    parser.add_argument(
        "--devices",
        type=_devices,
        default="0",
        metavar="0,1",
        help="the CUDA devices to offer, a rank for each; without CUDA any numbers do (default: %(default)s)",
    )
    parser.add_argument(
        "--salt-file",
        type=salt_file,
        dest="salt",
        metavar="FILE",
        help="a file with the session salt, 32 hex digits; without it the controller must admit anyone",
    )
    parser.add_argument(
        "--dataset-sig",
        type=_signature,
        default=bytes(32),
        metavar="HEX",
        help="the data set's signature where the cluster checks it, 64 hex digits",
    )
    parser.add_argument("--revision", choices=REVISIONS, default="0.6", help="the wire's (default: %(default)s)")
    later = parser.add_argument_group("from revision 0.8 on, what all hosts that tell it must have in common")
    later.add_argument("--model-sig", type=_signature, metavar="HEX", help="the model's signature, 64 hex digits")
    later.add_argument("--run-id", metavar="TEXT", help="the identity of the run that this host has prepared")
    later.add_argument(
        "--nccl-version", type=_nccl_version, metavar="2.21.5", help="of the NCCL or RCCL that the ranks load"
    )


def _devices(text: str) -> bytes:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < 256 for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"expected different numbers from 0 to 255 with commas between, got {text!r}")
    return bytes(map(int, parts))


def _signature(text: str) -> bytes:
    try:
        signature = bytes.fromhex(text)
    except ValueError:
        signature = b""
    if len(signature) != 32:
        raise argparse.ArgumentTypeError(f"expected 64 hex digits, got {text!r}")
    return signature


def _nccl_version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) < 2**32 for part in parts):
        raise argparse.ArgumentTypeError(f"expected three numbers with points between, got {text!r}")
    return tuple(map(int, parts))


def _command(args: argparse.Namespace) -> list[str]:
    """What to start for each rank, without the "--" before it, which some Pythons leave there."""
    words: list[str] = args.command
    return words[1:] if words[0] == "--" and len(words) > 1 else words


def run(args: argparse.Namespace) -> int:
    """Join, run the ranks to their end, and return the exit code."""
    try:
        with _termination():
            return _join(args)
    except _Stop as stop:
        _say(str(stop))
        return stop.code
    except KeyboardInterrupt:
        _say("interrupted")
        return 128 + signal.SIGINT


@contextmanager
def _termination() -> Iterator[None]:
    """Have signals that end a process end the agent the way Ctrl-C does."""

    def stop(number: int, _: Any) -> None:
        raise _Stop(signal.strsignal(number) or "ended by a signal", 128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"flodl-fast join: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------- joining


def _join(args: argparse.Namespace) -> int:
    command = _command(args)
    if shutil.which(command[0]) is None:
        raise _Stop(f"there is no command {command[0]!r}", Exit.USAGE)
    codec = Codec(args.salt or bytes(protocol.SALT_SIZE), args.revision)
    hello = _hello(codec, args)
    where = "{}:{}".format(*args.controller)
    deadlines = Deadlines()
    patience = deadlines.attempts * deadlines.pause
    _say(f"{args.host} offers {len(args.devices)} rank(s) to {where}, dialled for up to {patience:g} s")
    try:
        channel = JoinChannel.connect(args.controller, codec, deadlines=deadlines)
    except HandshakeError as error:
        raise _Stop(str(error), Exit.TIMED_OUT) from error
    with channel:
        accept = _admission(channel, hello, args)
        ranks = ", ".join(map(str, accept.ranks))
        _say(f"admitted as rank {ranks}; waiting for the world, up to {accept.formation_wait_secs} s")
        environments = _world(channel, args, accept)
        _say("the world has formed")
        return _Ranks(channel).run(command, dict(zip(accept.ranks, environments, strict=True)))


def _hello(codec: Codec, args: argparse.Namespace) -> JoinHello:
    """This host's offer, which the revision can carry."""
    hello = JoinHello(
        host=args.host,
        local_devices=args.devices,
        gpus=[f"device {device}" for device in args.devices],
        libtorch=f"none, flodl_fast {version('flodl_fast')}",
        dataset_sig=args.dataset_sig,
        run_id=args.run_id,
        nccl_version=args.nccl_version,
        model_sig=args.model_sig,
    )
    try:
        codec.encode_payload(hello)
    except EncodeError as error:
        raise _Stop(str(error), Exit.USAGE) from error
    return hello


def _admission(channel: JoinChannel, hello: JoinHello, args: argparse.Namespace) -> JoinAccept:
    """The controller's answer to this host's offer; from then on the channel uses the session salt."""
    patience = scaled(protocol.JOIN_REPLY)
    try:
        channel.send(hello)
        answer = channel.recv(patience)
    except TimeoutError as error:
        raise _Stop(f"the controller has not answered in {patience} s", Exit.TIMED_OUT) from error
    except AuthenticationError as error:
        raise _Stop(
            f"the controller's answer is signed with another salt than {_salt_in_use(args)}", Exit.REFUSED
        ) from error
    except ChannelClosed as error:
        # The crate answers a hello whose MAC does not hold by hanging up.
        raise _Stop(
            f"refused without a word ({error}): the session salt is wrong, this host uses {_salt_in_use(args)}; "
            f"or the join window is closed, or the controller speaks another revision than {args.revision}",
            Exit.REFUSED,
        ) from error
    except ChannelError as error:
        raise _Stop(f"the controller's answer breaks off: {error}", Exit.LOST) from error
    except DecodeError as error:
        raise _Stop(f"the answer is not from a flodl controller of this revision: {error}", Exit.LOST) from error
    if isinstance(answer, JoinReject):
        raise _Stop(f"refused: {answer.reason}", Exit.REFUSED)
    if not isinstance(answer, JoinAccept):  # The messages themselves may hold the salt.
        raise _Stop(f"expected an answer, the controller sends a {type(answer).__name__}", Exit.LOST)
    if len(answer.ranks) != len(args.devices):
        raise _Stop(f"{len(args.devices)} devices were offered, the controller admits ranks {answer.ranks}", Exit.LOST)
    if args.salt is None:
        if answer.salt_hex is None:
            raise _Stop("the controller admits this host but keeps the session salt: give --salt-file", Exit.REFUSED)
        try:
            channel.rekey(Codec(answer.salt_hex, args.revision))
        except ValueError as error:
            raise _Stop(f"the controller's salt cannot be: {error}", Exit.LOST) from error
    return answer


def _salt_in_use(args: argparse.Namespace) -> str:
    return "that of --salt-file" if args.salt is not None else "none, for it has no --salt-file"


def _world(channel: JoinChannel, args: argparse.Namespace, accept: JoinAccept) -> list[dict[str, str]]:
    """The environment of each rank, once the controller has formed the world."""
    until = time.monotonic() + accept.formation_wait_secs + protocol.FORMATION_MARGIN
    message = _wait_for_world(channel, args.controller, until)
    if isinstance(message, JoinAbort):
        raise _Stop(f"the controller gives the run up: {message.reason}", Exit.ABORTED)
    if not isinstance(message, JoinWorldFormed):
        raise _Stop(f"expected the world, the controller sends a {type(message).__name__}", Exit.LOST)
    environments = []
    for index, (rank, device) in enumerate(zip(accept.ranks, args.devices, strict=True)):
        environ = {
            CLUSTER: message.envelope_hex,
            LOCAL_RANK: str(index),
            HOST_NAME: args.host,
            ROUTE: "direct",
            REVISION: args.revision,
            "CUDA_VISIBLE_DEVICES": str(device),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        try:
            told = Environment.read(environ).rank
        except ValueError as error:
            raise _Stop(f"the controller describes a world that cannot be: {error}", Exit.LOST) from error
        if told != rank:
            raise _Stop(f"admitted as rank {rank}, the controller's world has rank {told} in its place", Exit.LOST)
        environments.append(environ)
    return environments


def _wait_for_world(channel: JoinChannel, controller: Address, until: float) -> Message | RelayMsg:
    state = None
    watching = True
    said = time.monotonic()
    while (left := until - time.monotonic()) > 0:
        try:
            return channel.recv(min(left, STATUS_EVERY))
        except TimeoutError:
            pass
        except FlodlError as error:
            raise _Stop(f"the controller is gone: {error}", Exit.LOST) from error
        before, state = state, _status(controller) if watching else None
        watching = state is not None
        if state != before or time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            _say(f"{state or 'still waiting'}; waits {until - said:.0f} s more")
    raise _Stop("the world has not formed in time", Exit.TIMED_OUT)


def _status(controller: Address) -> str | None:
    """What the controller's status page says of the join window; None where there is no such page."""
    try:
        return headline(fetch_state(controller))
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------------------ ranks


class _Ranks:
    """The processes of this host's ranks, and the controller that they train for.

    Args:
        channel: the join channel, which the controller keeps open for the run.
    """

    def __init__(self, channel: JoinChannel) -> None:
        self._channel = channel
        self._events: _Events = SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}
        self._waiters: list[threading.Thread] = []
        self._forwarders: list[threading.Thread] = []
        self._output = threading.Lock()

    def run(self, command: Sequence[str], environments: dict[int, dict[str, str]]) -> int:
        """Start a process for each rank and see all of them to their end; the exit code."""
        _thread(self._watch_controller)
        lost = None
        try:
            for rank, environ in environments.items():
                self._start(rank, command, environ)
            lost = self._wait()
        finally:
            self._end()
        if not any(self._codes.values()):
            return Exit.OK
        if lost is not None:
            raise lost
        return Exit.RANK_FAILED

    def _start(self, rank: int, command: Sequence[str], environ: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLODL_INTERNAL_")}
        try:
            # A session of its own: Ctrl-C reaches it through this agent only, and all that it starts can be ended.
            process = subprocess.Popen(
                command,
                env={"PYTHONUNBUFFERED": "1", **inherited, **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise _Stop(f"rank {rank} cannot be started: {error}", Exit.USAGE) from error
        self._processes[rank] = process
        self._waiters.append(_thread(self._wait_for, rank, process))
        self._forwarders.append(_thread(self._forward, rank, process.stdout, sys.stdout))
        self._forwarders.append(_thread(self._forward, rank, process.stderr, sys.stderr))

    def _wait(self) -> _Stop | None:
        """Wait until all have ended by themselves; what became of the controller if that is why they did."""
        lost: _Stop | None = None
        until: float | None = None
        while len(self._codes) < len(self._processes):
            try:
                event = self._events.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except Empty:
                assert lost is not None
                raise lost from None
            if isinstance(event, _Ended):
                self._report(event)
            elif event.code == Exit.LOST:
                # Ranks may be about to leave: a controller goes once all of them have said so.
                lost, until = event, time.monotonic() + LOST_GRACE
            else:
                raise event
        return lost

    def _end(self) -> None:
        """End those that have not: ask, wait, kill; then report all that is left to report."""
        living = {rank: process for rank, process in self._processes.items() if rank not in self._codes}
        try:
            for process in living.values():
                _signal(process, signal.SIGTERM)
            until = time.monotonic() + TERMINATE_GRACE
            for process in living.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        finally:  # A second Ctrl-C ends the wait.
            for process in living.values():
                _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        for thread in self._waiters:
            thread.join()
        until = time.monotonic() + DRAIN
        for thread in self._forwarders:
            thread.join(max(0.0, until - time.monotonic()))
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _Ended):
                self._report(event)

    def _report(self, ended: _Ended) -> None:
        rank, code = ended
        self._codes[rank] = code
        if code:
            how = f"with code {code}" if code > 0 else f"by signal {-code}"
            _say(f"rank {rank} ended {how}")
        with suppress(ChannelError):  # near its end the controller may be gone
            self._channel.send(JoinRankExited(rank, max(code, -1)))

    # -- threads

    def _watch_controller(self) -> None:
        try:
            while not isinstance(message := self._channel.recv(), JoinAbort):
                pass
            self._events.put(_Stop(f"the controller gives the run up: {message.reason}", Exit.ABORTED))
        except FlodlError as error:
            self._events.put(_Stop(f"the controller is gone: {error}", Exit.LOST))

    def _wait_for(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._events.put(_Ended(rank, process.wait()))

    def _forward(self, rank: int, source: IO[bytes], target: Any) -> None:
        """Pass on output line by line, to the end whatever becomes of the target, lest the rank stand still."""
        with source:
            for line in iter(partial(source.readline, LINE), b""):
                with self._output, suppress(AttributeError, OSError, ValueError):
                    target.buffer.write(b"[rank %d] " % rank + line.rstrip(b"\r\n") + b"\n")
                    target.flush()


def _thread(run: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=run, args=args, daemon=True)
    thread.start()
    return thread


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process that has not ended, and to all that it has started."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # it is ending just now
            os.killpg(process.pid, number)
    else:
        process.terminate()

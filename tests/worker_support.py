"""What the worker's tests share: a coordinator that follows a script, the crate's live stack, ranks as threads."""

from __future__ import annotations

import itertools
import json
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import SALT

import flodl_fast as ff
from flodl_fast.capture import Direction
from flodl_fast.channel import ControlChannel, DataChannel, accept
from flodl_fast.demo import Tap
from flodl_fast.worker import Worker

CODEC = ff.Codec(SALT)
# What ranks can speak, and in which dtype their Model rounds travel.
SPOKEN = pytest.mark.parametrize(
    ("revision", "wire"), [("0.6", None), ("0.7", None), ("0.7", "bf16"), ("0.8", None), ("0.8", "bf16")]
)
WAIT = 120.0  # seconds after which a test that waits has failed; a busy machine takes its time


class Running:
    """A call in a thread of its own, whose result or exception is waited for."""

    def __init__(self, call: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        self._outcome: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(call, args, keywords), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., Any], args: Any, keywords: Any) -> None:
        try:
            self._outcome.put((call(*args, **keywords), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def join(self) -> None:
        """Wait for the end, whatever it was."""
        self._thread.join(WAIT)

    def result(self, timeout: float = WAIT) -> Any:
        result, error = self._outcome.get(timeout=timeout)
        if error is not None:
            raise error
        return result


class Coordinator:
    """The controller's side of one rank, as the test says: it sends what it is told to and shows what came."""

    def __init__(self, revision: str = "0.6") -> None:
        self.codec = ff.Codec(SALT, revision)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(WAIT)
        self.address = self.listener.getsockname()
        self.world = 1
        self.control: ControlChannel
        self.data: DataChannel
        self._opened = ExitStack()

    def accept(self) -> ControlChannel | DataChannel:
        return self._opened.enter_context(accept(self.listener.accept()[0], self.codec, self.world))

    @contextmanager
    def serving(self, params: Any, world: int = 1, **options: Any) -> Iterator[Worker]:
        """A worker of rank 0 whose two channels are served; without formation unless asked for."""
        self.world = world
        options = {"formation": False, "host": "here", **options}
        made = Running(
            Worker, params, rank=0, world=world, codec=self.codec, data=self.address, control=self.address, **options
        )
        self.data = self.accept()
        if options["formation"]:
            for _ in filter(None, (params, options.get("buffers"))):
                self.data.send(self.data.recv(WAIT))
        self.control = self.accept()
        worker = made.result()
        try:
            yield worker
        finally:
            worker.close()

    def send(self, *messages: ff.ControlMsg) -> None:
        for message in messages:
            self.control.send(message)

    def plan(self, epoch: int, offset: int, size: int) -> None:
        self.send(ff.StartEpoch(ff.EpochPlan(epoch, offset, size)))

    def receive(self) -> Any:
        """The next message that is no heartbeat."""
        end = time.monotonic() + WAIT
        while isinstance(message := self.control.recv(max(0.0, end - time.monotonic())), ff.Heartbeat):
            pass
        return message

    def round(self, *others: ff.RoundFrame) -> ff.RoundFrame:
        """Serve one round: this rank's frame, reduced with those of the other ranks; what the rank sent."""
        frame = self.data.recv(WAIT)
        self.data.send(ff.reduce_frames([frame, *others]))
        return frame

    def close(self) -> None:
        self._opened.close()
        self.listener.close()


class Stack:
    """`peer stack`: the crate's controller, coordinator and relays, in one process.

    Ranks that say nothing live on, also those without a control channel, unless ``options`` say how long.
    """

    def __init__(
        self,
        binary: Path,
        *options: Any,
        revision: str = "0.6",
        env: dict[str, str] | None = None,
        max_secs: int = 600,
    ) -> None:
        self.codec = ff.Codec(SALT, revision)
        # Of an option that comes twice the peer takes the first.
        given = [*map(str, options), "--max-secs", str(max_secs), "--heartbeat-timeout", str(max_secs)]
        command = [str(binary), "stack", "--salt", SALT.hex(), *given]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        first = json.loads(self.process.stdout.readline())
        self.world: int = first["world"]
        self.controller = ("127.0.0.1", first["controller"])
        self.relays: dict[tuple[str, int], tuple[str, int]] = {
            (relay["channel"].lower(), rank): ("127.0.0.1", relay["port"])
            for relay in first.get("relays", ())
            for rank in relay["ranks"]
        }
        self._lines = Running(lambda: [json.loads(line) for line in self.process.stdout])

    def options(self, rank: int, direct: bool = False) -> dict[str, Any]:
        """The keywords of Worker that make it this rank."""
        where = (
            {"data": self.controller, "control": self.controller, "host": f"direct{rank}"}
            if direct
            else {"data": self.relays["data", rank], "control": self.relays["control", rank]}
        )
        return {"rank": rank, "world": self.world, "codec": self.codec, **where}

    def lines(self, timeout: float = WAIT) -> list[dict[str, Any]]:
        """All that it printed after its first line, once it has ended."""
        lines = self._lines.result(timeout)
        self.process.wait(timeout)
        return lines

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self._lines.join()
        self.process.stdout.close()
        self.process.wait()


def settle(worker: Worker, heard: Iterable[ff.ControlMsg]) -> None:
    """Serve until the coordinator has taken all that this rank has told it: before a plan's report, all its batches.

    The crate's takes reports and batches from two queues. Where it sees the last reports of a run before any batch of
    theirs, it ends the run without the average that these still need. An evaluation stands in one queue with the
    batches, and is told on to all at once.

    Args:
        worker: the rank's.
        heard: what its ``on_message`` hears.
    """
    echo = ff.EvalBroadcast(worker.steps, float(worker.rank))
    worker._send(ff.EvalResult(worker.rank, 0, echo.epoch, echo.metric, 0.0))
    while worker.ended is None and echo not in heard:
        worker.serve()
        time.sleep(0.001)


_CYCLE = (ff.RequestParams, ff.Update)


def await_update(worker: Worker, heard: Sequence[ff.ControlMsg]) -> None:
    """Serve until the average is closed that this rank has had its part in.

    What it trains before, the crate's coordinator takes for averaged, and may end the run without another average.

    Args:
        worker: the rank's.
        heard: what its ``on_message`` hears.
    """
    while worker.ended is None and [type(m) for m in heard if isinstance(m, _CYCLE)][-1:] == [ff.RequestParams]:
        worker.serve()
        time.sleep(0.001)


class SettlingTap(Tap):
    """The demonstration's tap, where what ranks tell waits that call neither ``settle`` nor ``await_update``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._closed: dict[str, threading.Event] = {}  # by leg, since its first SyncAck: no average is open
        self._numbers = itertools.count(-1, -1)  # none of a rank that settles by itself
        self._settled: dict[float, threading.Event] = {}

    def _pass(self, data: bytes, sink: socket.socket, leg: str, direction: Direction, prefix: bytes = b"") -> None:
        match self._codec.decode(data) if prefix and leg.endswith("control") else None:
            case ff.SyncAck():
                self._closed[leg] = threading.Event()
            case ff.Update():
                self._closed[leg].set()
            case ff.Batch() if leg in self._closed:
                self._closed[leg].wait(WAIT)
            case ff.MetricsMsg(rank):
                number = float(next(self._numbers))
                self._settled[number] = threading.Event()
                ask = self._codec.encode(ff.EvalResult(rank, 0, 0, number, 0.0))
                sink.sendall(len(ask).to_bytes(4, "little") + ask)
                self._settled[number].wait(WAIT)
            case ff.EvalBroadcast(_, number) if number in self._settled:
                self._settled[number].set()
                return  # no rank has asked
        super()._pass(data, sink, leg, direction, prefix)


class Relay:
    """A relay that forwards bytes between ranks and another address, to be killed alone."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._to = to
        self._sockets: list[socket.socket] = [self._listener]
        self.address = self._listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self._to)
            self._sockets += near, far
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def until(condition: Callable[[], bool], timeout: float = WAIT) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.01)


def named(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    """A model's arrays with the names that 0.8 has its ranks compare."""
    return {f"layer{i}": array for i, array in enumerate(arrays)}


def rounded(array: np.ndarray, wire: str | None) -> np.ndarray:
    """Values as they come through the wire."""
    return array if wire is None else array.astype(ml_dtypes.bfloat16).astype(np.float32)


@contextmanager
def running(*command: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process, its output a pipe of text, that does not outlive the block."""
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def peer_ranks(binary: Path, stack: Any, wire: str | None) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """What starts a `peer rank`, behind a ``SettlingTap`` before the relays of a stack.

    It is a rank of the crate's own making, whose model is an array of so many values; from 0.8 on that is layer0.
    """
    with SettlingTap(stack.codec) as tap, ExitStack() as started:
        tap.routes = stack.relays
        port = tap.address[1]

        def start(rank: int, size: int, *options: object) -> subprocess.Popen[str]:
            signature = ff.model_sig(named([np.empty(size, np.float32)])).hex()
            return started.enter_context(
                running(
                    binary, "rank", "--salt", SALT.hex(), "--rank", rank, "--world", stack.world, "--data", port,
                    "--control", port, "--params", size, "--model-sig", signature, *(["--bf16"] if wire else []),
                    *options,
                )
            )  # fmt: skip

        yield start


def ask_for_an_average(
    coordinator: Coordinator, worker: Worker, others: list[list[ff.RoundFrame]]
) -> tuple[ff.SyncAck, list[ff.RoundFrame]]:
    """RequestParams served, the other ranks giving these frames to each round; the SyncAck and what the worker sent."""
    acks: list[ff.SyncAck] = []
    coordinator.send(ff.RequestParams())
    done = Running(until, lambda: worker.serve() or acks)
    assert coordinator.receive() == ff.SnapshotReady(0)
    sent = [coordinator.round(*frames) for frames in others]
    acks.append(coordinator.receive())
    done.result()
    return acks[0], sent


def stepped(coordinator: Coordinator, worker: Worker, steps: int) -> list[ff.Batch]:
    """So many steps of one sample; what the worker reported of them."""
    coordinator.plan(0, 0, steps)
    plan = next(worker.plans())
    for _ in plan.batches(1):
        worker.step(0.5)
    return [coordinator.receive() for _ in range(steps)]

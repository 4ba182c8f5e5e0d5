"""The demonstration: ranks, each a process, train one small network on real data and speak flodl's wire over sockets.

To read it as an example, start at `train_rank`, which is all that a rank is. Between ranks and cluster stands a `Tap`
that sees every frame; the cluster is a LocalCluster or, with ``--peer``, the published crate's.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import secrets
import shlex
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import flodl_fast as ff

from .capture import CaptureWriter, Direction
from .channel import Address
from .cli import REVISIONS
from .protocol import LENGTH_PREFIX, MAGIC_DATA_HELLO

__all__ = ["add_arguments", "run"]

HELD_OUT = 360
HIDDEN = 64
LEARNING_RATE = 0.2
MOMENTUM = np.float32(0.9)
BUILD = Path(__file__).resolve().parents[1] / "interop" / "peer" / "build.sh"


# ------------------------------------------------------------------------------------------------- data and network


class Digits(NamedTuple):
    """Images as rows of 64 float32 from 0 to 1, and the digit that each shows."""

    images: np.ndarray
    labels: np.ndarray

    def take(self, indices: np.ndarray) -> Digits:
        return Digits(self.images[indices], self.labels[indices])


def load_digits() -> tuple[Digits, Digits]:
    """scikit-learn's 1,797 scanned digits: those to train on and those held out, always the same.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    digits = Digits((images / 16).astype(np.float32), labels)
    order = np.random.default_rng(0).permutation(len(labels))
    return digits.take(order[HELD_OUT:]), digits.take(order[:HELD_OUT])


class Network:
    """One hidden layer of ReLUs, softmax over the ten digits, SGD with momentum; all in float32."""

    def __init__(self, seed: Sequence[int]) -> None:
        normal = np.random.default_rng(seed).standard_normal
        self.parameters = [
            normal((64, HIDDEN), np.float32) * np.float32(math.sqrt(2 / 64)),
            np.zeros(HIDDEN, np.float32),
            normal((HIDDEN, 10), np.float32) * np.float32(math.sqrt(2 / HIDDEN)),
            np.zeros(10, np.float32),
        ]
        self._velocities = [np.zeros_like(p) for p in self.parameters]

    def step(self, batch: Digits, learning_rate: float) -> float:
        """Take one step, in place; returns the batch's mean loss before it."""
        hidden, scores = self._forward(batch.images)
        error = np.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        wanted = np.arange(len(batch.labels)), batch.labels
        loss = -float(np.log(np.maximum(error[wanted], np.float32(1e-12))).mean())
        error[wanted] -= 1
        error /= np.float32(len(batch.labels))
        back = (error @ self.parameters[2].T) * (hidden > 0)
        gradients = batch.images.T @ back, back.sum(0), hidden.T @ error, error.sum(0)
        for parameter, velocity, gradient in zip(self.parameters, self._velocities, gradients, strict=True):
            velocity *= MOMENTUM
            velocity += gradient
            parameter -= np.float32(learning_rate) * velocity
        return loss

    def accuracy(self, digits: Digits) -> float:
        """The share of images that it recognises."""
        return float((self._forward(digits.images)[1].argmax(1) == digits.labels).mean())

    def _forward(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights1, bias1, weights2, bias2 = self.parameters
        hidden = np.maximum(images @ weights1 + bias1, 0)
        return hidden, hidden @ weights2 + bias2


# ------------------------------------------------------------------------------------------------------------ ranks


@dataclass(frozen=True)
class Recipe:
    """What never crosses the wire: ranks and cluster agree on it beforehand.

    Raises:
        ValueError: a number that no training can have.
    """

    ranks: int
    epochs: int
    batch: int
    seed: int
    samples: int
    revision: str = "0.6"

    def __post_init__(self) -> None:
        if min(self.ranks, self.epochs, self.batch) < 1 or self.seed < 0 or self.ranks * self.batch > self.samples:
            raise ValueError(
                f"ranks, epochs and batch start at 1, seed at 0, and ranks times batch ends at {self.samples} images"
            )

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's shuffled list of samples; plans are slices of it."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.samples)

    def learning_rate(self, step: int) -> float:
        """Down to 0 along half a cosine; ``step`` counts the batches of the cohort over the whole run."""
        return LEARNING_RATE / 2 * (1 + math.cos(math.pi * step * self.batch / (self.epochs * self.samples)))


def train_rank(rank: int, recipe: Recipe, salt: str, relay: Address, training: Digits, held_out: Digits) -> Network:
    """A rank's whole life; returns the network that it ends with."""
    network = Network([recipe.seed, rank])  # All ranks go on from rank 0's.
    model = dict(zip(("weights1", "bias1", "weights2", "bias2"), network.parameters, strict=True))
    codec = ff.Codec(salt, recipe.revision)
    with ff.Worker(model, rank=rank, world=recipe.ranks, codec=codec, data=relay, control=relay) as worker:
        for plan in worker.plans():
            order = recipe.order(plan.epoch)
            for picks in plan.batches(recipe.batch):
                rate = recipe.learning_rate(worker.global_step)
                loss = network.step(training.take(order[picks]), rate)
                worker.step(loss, lr=rate)
            worker.log("held-out", network.accuracy(held_out))
    return network


# -------------------------------------------------------------------------------------------------------------- tap

Routes = dict[tuple[str, int], Address]  # by channel, "data" or "control", and rank


class Tap(socketserver.ThreadingTCPServer):
    """What the ranks dial as their relay: counts, records and converts every frame, and passes it on as it came.

    Converted means decoded and encoded again, which must give the same bytes. So all that ranks and cluster convert
    is converted once more, in a place with a clock.

    Args:
        codec: the cluster's.
        capture: where to record all frames, None for nowhere.

    Attributes:
        address: to dial.
        routes: where connections go on to.
    """

    def __init__(self, codec: ff.Codec, capture: CaptureWriter | None = None) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.address: Address = self.socket.getsockname()
        self.routes: Routes = {}
        self._codec, self._capture = codec, capture
        self._lock = threading.Lock()
        self._messages = self._bytes = 0
        self._converting = self._first = self._last = 0.0
        self._error: ff.DecodeError | None = None

    def totals(self) -> np.ndarray:
        """Messages, bytes, seconds of conversion, and seconds from the first message to the last, up to now."""
        with self._lock:
            return np.array([self._messages, self._bytes, self._converting, self._last - self._first])

    def __enter__(self) -> Tap:
        threading.Thread(target=self.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all connections have ended.

        Raises:
            DecodeError: of a frame that is none, or that conversion changes; it has ended its connection.
        """
        self.shutdown()
        self.server_close()
        if self._error is not None:
            raise self._error

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in a thread of its own."""
        codec = self._codec
        with suppress(OSError), request.makefile("rb") as up:
            hello = _take(up, len(codec.data_hello(0, 1)))  # which begins as a control hello does
            magic, _, rank, _ = struct.unpack("<4I", hello)
            channel, ack_size = "data", len(codec.data_ack())
            if magic != MAGIC_DATA_HELLO:
                channel, ack_size = "control", len(codec.control_ack())
                hello += _take(up, codec.measure_control_hello(hello) - len(hello))
            leg = f"rank {rank} {channel}"
            with socket.create_connection(self.routes[channel, rank]) as far, far.makefile("rb") as down:
                for sock in (request, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pass(hello, far, leg, Direction.UP)
                self._pass(_take(down, ack_size), request, leg, Direction.DOWN)
                back = threading.Thread(target=self._forward, args=(down, request, leg, Direction.DOWN))
                back.start()
                self._forward(up, far, leg, Direction.UP)
                back.join()

    def _forward(self, source: BinaryIO, sink: socket.socket, leg: str, direction: Direction) -> None:
        """Pass on one direction's frames, each with its length before it, until it ends."""
        try:
            while prefix := source.read(LENGTH_PREFIX):
                frame = _take(source, int.from_bytes(prefix, "little"))
                self._pass(frame, sink, leg, direction, prefix)
        except ff.DecodeError as error:
            self._error = error
        except OSError:
            pass  # The connection has ended, and with it what hangs on it.
        finally:
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def _pass(self, data: bytes, sink: socket.socket, leg: str, direction: Direction, prefix: bytes = b"") -> None:
        with self._lock:
            self._last = perf_counter()
            self._first = self._first or self._last
            self._messages += 1
            self._bytes += len(prefix) + len(data)
            if self._capture is not None:
                self._capture.write(data, leg, direction)
        if prefix:
            started = thread_time()
            if leg.endswith("data"):
                converted = self._codec.encode_round(self._codec.decode_round(data, elided="keep"))
            else:
                converted = self._codec.encode(self._codec.decode(data))
            seconds = thread_time() - started
            with self._lock:
                self._converting += seconds
            if converted != data:
                raise ff.DecodeError(f"a frame of {leg} is not the same after decoding and encoding")
        sink.sendall(prefix + data)


def _take(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise ConnectionError(f"the connection ends {size - len(data)} bytes too soon")
    return data


# --------------------------------------------------------------------------------------------------------- clusters

Epochs = Iterator[tuple[int, float, float]]  # number, mean loss, mean held-out accuracy


@contextmanager
def local_cluster(recipe: Recipe, salt: str) -> Iterator[tuple[Routes, Epochs]]:
    """A LocalCluster: where the ranks' connections go, and its epochs as they end."""
    work = recipe.ranks, recipe.samples, recipe.batch, recipe.epochs
    with ff.LocalCluster(*work, salt=salt, revision=recipe.revision) as cluster:
        ports = zip(("data", "control"), cluster.relay_ports, strict=True)
        routes = {(channel, rank): ("127.0.0.1", port) for channel, port in ports for rank in range(recipe.ranks)}
        yield routes, ((m.epoch, m.avg_loss, m.scalars["held-out"]) for m in cluster.epochs())


@contextmanager
def crate_cluster(recipe: Recipe, salt: str, peer: str) -> Iterator[tuple[Routes, Epochs]]:
    """The same of the published crate: its controller, and a relay for every two ranks."""
    ranks = [str(rank) for rank in range(recipe.ranks)]
    hosts = ";".join(",".join(ranks[first : first + 2]) for first in range(0, len(ranks), 2))
    numbers = f"--samples {recipe.samples} --batch {recipe.batch} --epochs {recipe.epochs} --max-secs 86400"
    command = [peer, "stack", "--salt", salt, "--hosts", hosts, *numbers.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            relays = json.loads(process.stdout.readline())["relays"]
            routes = {(r["channel"].lower(), rank): ("127.0.0.1", r["port"]) for r in relays for rank in r["ranks"]}
            yield routes, _read_epochs(process.stdout)
        finally:
            process.kill()


def _read_epochs(lines: Iterable[str]) -> Epochs:
    for line in lines:
        match json.loads(line):
            case {"epoch_metrics": {"epoch": number, "avg_loss": loss, "scalars": {"held-out": held_out}}}:
                yield number, loss, held_out
            case {"done": True, "dead": 0}:
                pass
            case other:
                raise ff.ChannelError(f"the controller says {other}")


def build_peer(revision: str) -> str:
    """The path of the reference peer of the published crate of that revision, built unless it was before.

    Raises:
        OSError: this is not a checkout, or the build fails, as without cargo.
    """
    if not BUILD.exists():
        raise FileNotFoundError(f"--peer needs a checkout of the repository, to build the crate by {BUILD}")
    print("Building the published crate, which takes a minute the first time.", file=sys.stderr)
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path.home() / ".cargo" / "bin")))
    command = ["bash", str(BUILD), f"{revision}.0"]
    try:
        return subprocess.check_output(command, text=True, env={**os.environ, "PATH": path}).strip()
    except subprocess.CalledProcessError as error:
        hint = "" if shutil.which("cargo", path=path) else ": it takes cargo (https://rustup.rs)"
        raise OSError(f"the published crate cannot be built{hint}") from error


# ----------------------------------------------------------------------------------------------------- command line


def train(
    recipe: Recipe,
    salt: str,
    data: tuple[Digits, Digits],
    tap: Tap,
    cluster: AbstractContextManager[tuple[Routes, Epochs]],
    report: Callable[[int, float, float], None],
) -> list[Network]:
    """All of it, wired together; returns each rank's network.

    Raises:
        FlodlError: the run cannot go on, or its ranks end with different parameters.
    """
    # In processes that leave Ctrl-C to this one, which ends the run for all.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(recipe.ranks, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    with pool, tap, cluster as (tap.routes, epochs):
        ranks = [pool.submit(train_rank, rank, recipe, salt, tap.address, *data) for rank in range(recipe.ranks)]
        for epoch in epochs:
            report(*epoch)
        networks = [rank.result() for rank in ranks]
    if len({b"".join(p.tobytes() for p in network.parameters) for network in networks}) > 1:
        raise ff.TensorError("the ranks end with different parameters")
    return networks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demonstration's options to a parser."""
    parser.add_argument("--peer", action="store_true", help="train under the published crate's controller")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (%(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="ranks that train (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images in a batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of first weights and shuffling (%(default)s)")
    parser.add_argument("--target", type=float, default=0.95, help="held-out accuracy to reach (%(default)s)")
    parser.add_argument("--revision", choices=REVISIONS, default="0.6", help="the wire's (%(default)s)")
    parser.add_argument("--salt", metavar="HEX", help="32 hex digits that key the frames' MACs (random)")
    parser.add_argument("--capture", metavar="FILE", default="demo.cap", help="record all frames here (%(default)s)")
    parser.add_argument("--no-capture", dest="capture", action="store_const", const=None, help="record nothing")


def run(args: argparse.Namespace) -> int:
    """Train and show it.

    Returns:
        The exit code: 0, 1 where the target is missed, 2 where the training cannot start or go on.
    """
    salt = (args.salt or secrets.token_hex(16)).strip()
    with ExitStack() as stack:
        try:
            training, held_out = load_digits()
            codec = ff.Codec(salt, args.revision)
            recipe = Recipe(args.ranks, args.epochs, args.batch, args.seed, len(training.labels), args.revision)
            cluster = (
                crate_cluster(recipe, salt, build_peer(args.revision)) if args.peer else local_cluster(recipe, salt)
            )
            file = stack.enter_context(open(args.capture, "wb")) if args.capture else None
            capture = None if file is None else CaptureWriter(file, revision=args.revision)
        except ImportError as error:
            return _fail(f"the digits come with scikit-learn ({error}), an extra: pip install 'flodl_fast[demo]'")
        except (ValueError, OSError) as error:
            return _fail(str(error))
        print(f"{recipe.ranks} ranks, {recipe.samples:,} images to train on, {len(held_out.labels)} held out")
        tap = Tap(codec, capture)
        try:
            networks = train(recipe, salt, (training, held_out), tap, cluster, _table(recipe, tap))
        except (ff.FlodlError, BrokenExecutor) as error:
            return _fail(str(error))
    accuracy = networks[0].accuracy(held_out)
    messages, size, converting, seconds = tap.totals()
    print(
        f"{accuracy:.1%} held-out accuracy of the network that all ranks end with; {messages:,.0f} messages and"
        f" {size:,.0f} bytes in {seconds:.1f} s, {converting / seconds:.1%} of it spent converting"
    )
    if args.capture:
        print(f"Every frame is in {args.capture}; to read it:")
        print(f"  {_python()} -m flodl_fast inspect {shlex.quote(args.capture)} --salt {salt}")
    if accuracy < args.target:
        print(f"The held-out accuracy of {accuracy:.1%} misses the target of {args.target:.1%}.", file=sys.stderr)
        return 1
    return 0


def _table(recipe: Recipe, tap: Tap) -> Callable[[int, float, float], None]:
    """Begins a table of the training; what it returns adds an epoch, with the traffic since the last one."""
    print(f"{'epoch':>7} {'loss':>8} {'held-out':>9} {'messages':>9} {'bytes':>11} {'converting':>11}")
    last = np.zeros(4)

    def row(number: int, loss: float, held_out: float) -> None:
        nonlocal last
        messages, size, converting, seconds = (now := tap.totals()) - last
        last = now
        share = converting / seconds if seconds else 0.0  # Two epochs may be told at once, with no message between.
        print(
            f"{f'{number + 1}/{recipe.epochs}':>7} {loss:>8.4f} {held_out:>9.1%} {messages:>9,.0f} {size:>11,.0f}"
            f" {share:>11.1%}",
            flush=True,
        )

    return row


def _python() -> str:
    """What to type for this Python: ``python`` where the shell means this one by it."""
    found = shutil.which("python")
    if found is not None and os.path.abspath(found) == os.path.join(os.path.dirname(sys.executable), "python"):
        return "python"
    below = Path(sys.executable).is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(sys.executable) if below else sys.executable)


def _fail(reason: str) -> int:
    print(f"flodl-fast demo: error: {reason}", file=sys.stderr)
    return 2

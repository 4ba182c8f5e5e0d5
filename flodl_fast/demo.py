"""The demonstration: ranks train one small network on real data and speak flodl's wire while they do.

All that ranks and coordinator tell each other crosses as whole frames over `Wire`s, connections inside this process,
and both sides behave as docs/wire.md §8 says. To read it as an example, start at `Rank`: `life` is the order of
things, `_average` a reduction.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import secrets
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import flodl_fast as ff

from .capture import CaptureWriter, Direction
from .protocol import LENGTH_PREFIX

__all__ = ["add_arguments", "run"]

HELD_OUT = 360
HIDDEN = 128
LEARNING_RATE = 0.2
MOMENTUM = np.float32(0.9)
BEACON_SECONDS = 1
FINAL_EVALUATION = 2**64 - 1  # the schedule_id of the last one


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

    def step(self, batch: Digits, learning_rate: float) -> tuple[float, int]:
        """Take one step; returns the batch's mean loss and how many of its images were recognised before it."""
        hidden, scores = self._forward(batch.images)
        recognised = int((scores.argmax(1) == batch.labels).sum())
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
        return loss, recognised

    def accuracy(self, digits: Digits) -> float:
        """The share of images that it recognises."""
        return float((self._forward(digits.images)[1].argmax(1) == digits.labels).mean())

    def _forward(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights1, bias1, weights2, bias2 = self.parameters
        hidden = np.maximum(images @ weights1 + bias1, 0)
        return hidden, hidden @ weights2 + bias2


def norm(tensors: Iterable[np.ndarray]) -> float:
    """The L2 norm over all tensors as SyncAck has it: per tensor in float32, the squares summed in float64."""
    return math.sqrt(sum(float(np.linalg.norm(t)) ** 2 for t in tensors))


@dataclass(frozen=True)
class Recipe:
    """What never crosses the wire: all members of the cohort agree on it beforehand.

    Raises:
        ValueError: a number that no training can have.
    """

    ranks: int
    epochs: int
    batch: int
    seed: int
    samples: int

    def __post_init__(self) -> None:
        if min(self.ranks, self.epochs, self.batch) < 1 or self.seed < 0 or self.batch > self.samples:
            raise ValueError(f"ranks, epochs and batch start at 1, seed at 0; a batch has up to {self.samples} images")

    @property
    def batches(self) -> int:
        """Full batches in an epoch, those of all ranks together."""
        return self.samples // self.batch

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's shuffled list of samples; plans are slices of it."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.samples)

    def learning_rate(self, step: int) -> float:
        """Down to 0 along half a cosine; ``step`` counts the batches of the cohort over the whole run."""
        return LEARNING_RATE / 2 * (1 + math.cos(math.pi * step / (self.epochs * self.batches)))


# ------------------------------------------------------------------------------------------------------------ wires


class Wire:
    """One end of a connection inside this process: bytes go in here and come out at the other end, in order."""

    def __init__(self) -> None:
        self._arrived = bytearray()
        self._news = asyncio.Event()
        self._ended = False
        self._other = self

    @staticmethod
    def pair() -> tuple[Wire, Wire]:
        """Both ends of a new connection."""
        one, other = Wire(), Wire()
        one._other, other._other = other, one
        return one, other

    def write(self, data: bytes | bytearray) -> None:
        self._other._arrived += data
        self._other._news.set()

    def close(self) -> None:
        """No more will be written at this end."""
        self._other._ended = True
        self._other._news.set()

    def take(self, limit: int = 1 << 16) -> bytes:
        """What has arrived, without waiting."""
        data = bytes(self._arrived[:limit])
        del self._arrived[:limit]
        return data

    async def read(self, limit: int = 1 << 16) -> bytes:
        """What has arrived, once there is any; nothing means that the other end is closed."""
        while not self._arrived and not self._ended:
            self._news.clear()
            await self._news.wait()
        return self.take(limit)

    async def read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (piece := await self.read(size - len(data))):
                raise ConnectionError(f"the connection ended {size - len(data)} bytes too soon")
            data += piece
        return data


class Traffic:
    """Counts what all legs carry, each frame where it is sent, and clocks the conversion at both ends."""

    def __init__(self, capture: CaptureWriter | None = None) -> None:
        self._capture = capture
        self._messages = self._bytes = 0
        self._converting = 0.0

    def timed(self, convert: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call one of the library's functions with the clock running."""
        started = perf_counter()
        result = convert(*arguments, **keywords)
        self._converting += perf_counter() - started
        return result

    def sent(self, data: bytes | bytearray, prefix: int, leg: str, direction: Direction) -> None:
        """Note a frame that has ``prefix`` bytes of length before it."""
        self._messages += 1
        self._bytes += len(data)
        if self._capture is not None:
            self._capture.write(memoryview(data)[prefix:], leg, direction)

    def totals(self) -> np.ndarray:
        """Messages, bytes, seconds of conversion and seconds on the clock, up to now."""
        return np.array([self._messages, self._bytes, self._converting, perf_counter()])


class Leg:
    """One end of a connection between a rank and the coordinator, as whole frames with a length before each.

    Args:
        kind: what it carries, "control" or "round".
        direction: of the frames that this end sends.
    """

    def __init__(
        self, codec: ff.Codec, kind: str, rank: int, direction: Direction, wire: Wire, traffic: Traffic
    ) -> None:
        self.rank = rank
        self._name = f"rank {rank} {'control' if kind == 'control' else 'data'}"
        self._codec, self._direction, self._wire, self._traffic = codec, direction, wire, traffic
        self._reader = ff.FrameReader(codec, kind, prefixed=True)
        self._writer = ff.FrameWriter(codec, kind, prefixed=True)

    def send(self, item: Any) -> None:
        """Send a message or a round frame."""
        self.post(self.encode(item))

    def encode(self, item: Any) -> Any:
        """The bytes of a message or round frame, its length before it."""
        return self._traffic.timed(self._writer.write, item)

    def post(self, data: bytes | bytearray, prefix: int = LENGTH_PREFIX) -> None:
        """Send bytes as they are."""
        self._traffic.sent(data, prefix, self._name, self._direction)
        self._wire.write(data)

    def poll(self) -> Any:
        """The next message or round frame that is here; None where there is none."""
        return self._next(self._wire.take())

    async def recv(self) -> Any:
        """The next message or round frame; None at the end."""
        data = b""
        while (item := self._next(data)) is None:
            if not (data := await self._wire.read()):
                self._reader.eof()
                return None
        return item

    async def all_reduce(
        self, layout: ff.TensorLayout, arrays: list[np.ndarray], kind: ff.RoundKind, weight: float
    ) -> float:
        """A rank's part in a round: the arrays go out, the reduced ones come back into them; returns their weight."""
        frame = self._traffic.timed(layout.encode, self._codec, arrays, kind, weight)
        self.post(len(frame).to_bytes(LENGTH_PREFIX, "little") + frame)
        size = int.from_bytes(await self._wire.read_exactly(LENGTH_PREFIX), "little")
        if size != len(frame):
            raise ff.TensorError(f"{len(frame)} bytes went into the round, {size} came out")
        reply = await self._wire.read_exactly(size)
        _, total = self._traffic.timed(layout.decode_into, self._codec, reply, arrays)
        return float(total)

    def close(self) -> None:
        self._wire.close()

    def _next(self, data: bytes) -> Any:
        self._traffic.timed(self._reader.feed, data)
        return self._traffic.timed(self._reader.next)


async def dial(codec: ff.Codec, kind: str, rank: int, world: int, wire: Wire, traffic: Traffic) -> Leg:
    """A rank's end of a new leg, after the handshake (docs/wire.md §7)."""
    leg = Leg(codec, kind, rank, Direction.UP, wire, traffic)
    if kind == "control":
        leg.post(codec.control_hello(rank, world), prefix=0)
        codec.check_control_ack(await wire.read_exactly(len(codec.control_ack())))
    else:
        leg.post(codec.data_hello(rank, world), prefix=0)
        codec.check_data_ack(await wire.read_exactly(len(codec.data_ack())))
    return leg


async def accept(codec: ff.Codec, kind: str, wires: Sequence[Wire], traffic: Traffic) -> list[Leg]:
    """The coordinator's ends of the legs to all ranks, after the handshakes, in rank order."""
    world = len(wires)
    legs = {}
    for wire in wires:
        if kind == "control":
            hello = await wire.read_exactly(len(codec.control_hello(0, world)))
            (rank, _), ack = codec.check_control_hello(hello, world), codec.control_ack()
        else:
            hello = await wire.read_exactly(len(codec.data_hello(0, world)))
            rank, ack = codec.check_data_hello(hello, world), codec.data_ack()
        legs[rank] = Leg(codec, kind, rank, Direction.DOWN, wire, traffic)
        legs[rank].post(ack, prefix=0)
    return [legs[rank] for rank in range(world)]


async def beacon(send: Callable[[int], None]) -> None:
    """Call it at once and then every second, with the number of calls before."""
    for number in itertools.count():
        send(number)
        await asyncio.sleep(BEACON_SECONDS)


# ------------------------------------------------------------------------------------------------------------- rank


class Rank:
    """One rank, from its first hello to Exiting. It serves the messages that `Coordinator` sends, not all there are."""

    def __init__(
        self, codec: ff.Codec, rank: int, recipe: Recipe, training: Digits, held_out: Digits, traffic: Traffic
    ) -> None:
        self.network = Network([recipe.seed, rank])
        self._codec, self._rank, self._recipe, self._traffic = codec, rank, recipe, traffic
        self._training, self._held_out = training, held_out
        # Kept between rounds: a round of the same layout only compares it, and decodes into the same arrays.
        self._layout = ff.TensorLayout.of(self.network.parameters)
        self._spare = [np.empty_like(p) for p in self.network.parameters]
        self._counts = np.zeros(recipe.ranks, np.float32)
        self._counts_layout = ff.TensorLayout.of([self._counts])
        self._plans: deque[ff.EpochPlan] = deque()
        self._throttled = self._ended = False
        self._steps = self._steps_since_average = self._global_step = 0

    async def life(self, data: Wire, control: Wire) -> None:
        """All of it, in the order of docs/wire.md §8."""
        codec, rank, world = self._codec, self._rank, self._recipe.ranks
        self._data = await dial(codec, "round", rank, world, data, self._traffic)
        await self._form()
        self._control = await dial(codec, "control", rank, world, control, self._traffic)
        heart = asyncio.create_task(beacon(lambda number: self._tell(ff.Heartbeat(rank, number))))
        while not self._ended:
            if self._plans:
                await self._train(self._plans.popleft())
            else:
                await self._wait()
        heart.cancel()
        self._tell(ff.Exiting(rank))
        self._control.close()
        self._data.close()

    async def _form(self) -> None:
        """Start from rank 0's parameters: the other ranks add zeros to them."""
        if self._rank != 0:
            for parameter in self.network.parameters:
                parameter[...] = 0
        await self._data.all_reduce(self._layout, self.network.parameters, ff.RoundKind.CONTROL, 0.0)

    async def _wait(self) -> None:
        """Serve the next control message; the end of the leg counts as Shutdown."""
        message = await self._control.recv()
        if message is None:
            self._ended = True
        else:
            await self._serve(message)

    async def _drain(self) -> None:
        """Between two batches: serve what has come, and stand still while throttled."""
        await asyncio.sleep(0)
        while (message := self._control.poll()) is not None:
            await self._serve(message)
        while self._throttled and not self._ended:
            await self._wait()

    async def _serve(self, received: ff.ControlMsg) -> None:
        if isinstance(received, ff.Update):  # It has no in-process form: the conversion below gives None.
            self._throttled = False
            if received.next_plan is not None:
                self._plans.append(received.next_plan)
        match self._traffic.timed(ff.control_wire_to_msg, received):
            case ff.StartEpoch(plan):
                self._plans.append(plan)
            case ff.RequestParams():
                await self._average()
            case ff.Throttle():
                self._throttled = True
            case ff.SetGlobalStep(step):
                self._global_step = step
            case ff.ExecuteEvalCallback(schedule_id, epoch, target):
                if target == self._rank:
                    self._evaluate(schedule_id, epoch)
            case ff.Shutdown():
                self._ended = True
            case None | ff.SetEpochCallbackRole() | ff.EpochAggregated() | ff.EvalBroadcast():
                pass  # This trainer has no callback for them.
            case message:
                raise NotImplementedError(f"no rank of the demonstration serves {type(message).__name__}")

    async def _train(self, plan: ff.EpochPlan) -> None:
        rank, size, started = self._rank, self._recipe.batch, perf_counter()
        chosen = self._recipe.order(plan.epoch)[plan.partition_offset :][: plan.partition_size]
        totals = np.zeros(4)
        for first in range(0, len(chosen) - size + 1, size):
            asked = perf_counter()
            batch = self._training.take(chosen[first : first + size])
            fetched = perf_counter()
            rate = self._recipe.learning_rate(self._global_step + self._steps_since_average)
            loss, recognised = self.network.step(batch, rate)
            compute_ms, data_ms = 1000 * (perf_counter() - fetched), 1000 * (fetched - asked)
            totals += loss, recognised, compute_ms, data_ms
            self._steps += 1
            self._steps_since_average += 1
            param_norm = norm(self.network.parameters) if self._steps % 10 == 0 else None
            self._tell(ff.Batch(rank, compute_ms, data_ms, self._steps, param_norm, loss))
            self._tell(ff.LrUpdate(rank, rate))
            await self._drain()
            if self._ended:
                return
        losses, right, compute_ms, data_ms = totals
        batches = len(chosen) // size
        report = ff.MetricsMsg(
            rank=rank,
            epoch=plan.epoch,
            avg_loss=losses / max(1, batches),
            batches_processed=batches,
            epoch_ms=1000 * (perf_counter() - started),
            samples_processed=batches * size,
            share_complete_ms=compute_ms + data_ms,
            compute_only_ms=compute_ms,
            data_starve_ms=data_ms,
            scalars={"loss": (losses, batches), "accuracy": (right, batches * size)},
        )
        self._control.send(self._traffic.timed(ff.metrics_msg_to_wire, report))

    async def _average(self) -> None:
        """A round of batch counts and one of parameters; a rank that has not trained joins both, with mass 0."""
        own, result, batches = self.network.parameters, self._spare, self._steps_since_average
        self._tell(ff.SnapshotReady(self._rank))
        self._counts[:] = 0
        self._counts[self._rank] = batches
        await self._data.all_reduce(self._counts_layout, [self._counts], ff.RoundKind.CONTROL, 0.0)
        mass, total = ff.gamma_mass(batches), 0.0
        if self._counts.any():
            for parameter, scaled in zip(own, result, strict=True):
                np.multiply(parameter, np.float32(mass), out=scaled)
            total = await self._data.all_reduce(self._layout, result, ff.RoundKind.MODEL, mass)
        if ff.is_realized(total):
            self.network.parameters, self._spare = result, own
        else:
            result = own
        before, after = norm(own), norm(result)
        moved = norm(mine - average for mine, average in zip(own, result, strict=True))
        self._steps_since_average -= batches
        divergence = moved / after if after > 1e-10 else 0.0
        self._tell(ff.SyncAck(self._rank, 0, divergence, post_norm=after, pre_norm=before))

    def _evaluate(self, schedule_id: int, epoch: int) -> None:
        started = perf_counter()
        accuracy = self.network.accuracy(self._held_out)
        self._tell(ff.EvalResult(self._rank, schedule_id, epoch, accuracy, 1000 * (perf_counter() - started)))

    def _tell(self, message: Any) -> None:
        self._control.send(self._traffic.timed(ff.timing_msg_to_wire, message))


# ------------------------------------------------------------------------------------------------------ coordinator


class Coordinator:
    """Hands out plans, has the ranks average once an epoch, and gathers their metrics.

    Args:
        report: called once an epoch with its metrics and the held-out accuracy after it.

    Attributes:
        accuracy: the held-out accuracy that was evaluated last.
    """

    accuracy = 0.0

    def __init__(
        self, codec: ff.Codec, recipe: Recipe, traffic: Traffic, report: Callable[[ff.EpochMetrics, float], None]
    ) -> None:
        self._codec, self._recipe, self._traffic, self._report = codec, recipe, traffic, report

    async def reduce(self, wires: Sequence[Wire]) -> None:
        """The reduction service: a frame from every rank, the result back to all, until they close."""
        legs = await accept(self._codec, "round", wires, self._traffic)
        while None not in (frames := [await leg.recv() for leg in legs]):
            # One rank's NaN would be everyone's from here on: better an error that names the rank.
            self._broadcast(legs, self._traffic.timed(ff.reduce_frames, frames, finite=True))

    async def run(self, wires: Sequence[Wire]) -> None:
        """The whole training, up to every rank's Exiting."""
        legs = await accept(self._codec, "control", wires, self._traffic)
        heart = asyncio.create_task(beacon(lambda _: self._broadcast(legs, ff.CoordHeartbeat())))
        self._broadcast(legs, ff.SetEpochCallbackRole(0))
        epochs, step = self._recipe.epochs, 0
        for epoch in range(epochs):
            for leg, plan in zip(legs, plans(self._recipe, epoch), strict=True):
                leg.send(ff.StartEpoch(plan))
            reports = [await self._expect(leg, ff.MetricsMsg) for leg in legs]
            self._broadcast(legs, ff.RequestParams())
            self._broadcast(legs, ff.Throttle())
            for leg in legs:
                await self._expect(leg, ff.SyncAck)
            metrics = aggregate(epoch, reports)
            self._broadcast(legs, ff.EpochAggregated(self._traffic.timed(ff.epoch_metrics_to_wire, metrics)))
            self._broadcast(legs, ff.Update(version=epoch + 1))
            step += sum(report.batches_processed for report in reports)
            self._broadcast(legs, ff.SetGlobalStep(step))
            schedule_id = epoch if epoch + 1 < epochs else FINAL_EVALUATION
            self._broadcast(legs, ff.ExecuteEvalCallback(schedule_id, epoch + 1, target_rank=0))
            self.accuracy = (await self._expect(legs[0], ff.EvalResult)).metric
            self._broadcast(legs, ff.EvalBroadcast(epoch + 1, self.accuracy))
            self._report(metrics, self.accuracy)
        heart.cancel()
        self._broadcast(legs, ff.Shutdown())
        for leg in legs:
            await self._expect(leg, ff.Exiting)

    async def _expect(self, leg: Leg, wanted: type) -> Any:
        """The next message of that class from a rank; only a coordinator that schedules needs those before it."""
        while not isinstance(message := await leg.recv(), wanted):
            if message is None:
                raise ConnectionError(f"rank {leg.rank} left before its {wanted.__name__}")
        return message

    def _broadcast(self, legs: Sequence[Leg], item: Any) -> None:
        data = legs[0].encode(item)
        for leg in legs:
            leg.post(data)


def plans(recipe: Recipe, epoch: int) -> list[ff.EpochPlan]:
    """Each rank's slice of an epoch: the lower the rank, the larger; in the second epoch the last rank rests."""
    shares = np.arange(recipe.ranks, 0, -1)
    if epoch == 1 and recipe.ranks > 1:
        shares[-1] = 0
    bounds = [0, *(np.cumsum(shares) * recipe.batches // shares.sum() * recipe.batch)]
    return [ff.EpochPlan(epoch, start, end - start) for start, end in itertools.pairwise(bounds)]


def aggregate(epoch: int, reports: Sequence[ff.MetricsMsg]) -> ff.EpochMetrics:
    """The cohort's metrics from one report a rank: losses and scalars weighted by batches, times by their maximum."""
    shares = np.array([r.batches_processed for r in reports]) / sum(r.batches_processed for r in reports)
    per_rank = [{name: total / max(1, count) for name, (total, count) in r.scalars.items()} for r in reports]
    return ff.EpochMetrics(
        epoch=epoch,
        scalars={name: float(shares @ [scalars[name] for scalars in per_rank]) for name in per_rank[0]},
        per_rank=per_rank,
        avg_loss=float(shares @ [r.avg_loss for r in reports]),
        epoch_ms=max(r.epoch_ms for r in reports),
        per_rank_throughput=[r.samples_processed / (r.share_complete_ms or 1) for r in reports],
        per_rank_batch_share=list(shares),
        per_rank_share_complete_ms=[r.share_complete_ms for r in reports],
        per_rank_compute_only_ms=[r.compute_only_ms for r in reports],
        per_rank_data_starve_ms=[r.data_starve_ms for r in reports],
        device_indices=bytes(len(reports)),
    )


# ----------------------------------------------------------------------------------------------------- command line


async def train(
    codec: ff.Codec,
    recipe: Recipe,
    training: Digits,
    held_out: Digits,
    traffic: Traffic,
    report: Callable[[ff.EpochMetrics, float], None],
) -> tuple[float, list[Network]]:
    """Coordinator and ranks, wired together; returns the held-out accuracy and each rank's network."""
    coordinator = Coordinator(codec, recipe, traffic, report)
    ranks = [Rank(codec, rank, recipe, training, held_out, traffic) for rank in range(recipe.ranks)]
    data, control = [Wire.pair() for _ in ranks], [Wire.pair() for _ in ranks]
    await asyncio.gather(
        coordinator.run([wire for wire, _ in control]),
        coordinator.reduce([wire for wire, _ in data]),
        *(rank.life(d, c) for rank, (_, d), (_, c) in zip(ranks, data, control, strict=True)),
    )
    return coordinator.accuracy, [rank.network for rank in ranks]


class Progress:
    """Shows a training as it goes, a line an epoch."""

    def __init__(self, recipe: Recipe, traffic: Traffic) -> None:
        self._epochs, self._traffic = recipe.epochs, traffic
        self._start = self._last = traffic.totals()
        print(f"{recipe.ranks} ranks, {recipe.samples:,} images to train on, {HELD_OUT} held out")
        print(f"{'epoch':>7} {'loss':>8} {'held-out':>9} {'messages':>9} {'bytes':>11} {'converting':>11}")

    def row(self, metrics: ff.EpochMetrics, accuracy: float) -> None:
        """An epoch: the training loss in it, the held-out accuracy after it, and its traffic."""
        now = self._traffic.totals()
        messages, size, converting, seconds = now - self._last
        self._last = now
        epoch = f"{metrics.epoch + 1}/{self._epochs}"
        print(
            f"{epoch:>7} {metrics.avg_loss:>8.4f} {accuracy:>9.1%} {messages:>9,.0f} {size:>11,.0f}"
            f" {converting / seconds:>11.1%}",
            flush=True,
        )

    def end(self, accuracy: float) -> None:
        messages, size, converting, seconds = self._traffic.totals() - self._start
        print(
            f"{accuracy:.1%} held-out accuracy; {messages:,.0f} messages and {size:,.0f} bytes in {seconds:.1f} s,"
            f" {converting / seconds:.1%} of it spent converting"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demonstration's options to a parser."""
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (%(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="ranks that train (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images in a batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of first weights and shuffling (%(default)s)")
    parser.add_argument("--target", type=float, default=0.95, help="held-out accuracy to reach (%(default)s)")
    parser.add_argument("--salt", metavar="HEX", help="32 hex digits that key the frames' MACs (random)")
    parser.add_argument("--capture", metavar="FILE", default="demo.cap", help="record all frames here (%(default)s)")
    parser.add_argument("--no-capture", dest="capture", action="store_const", const=None, help="record nothing")


def run(args: argparse.Namespace) -> int:
    """Train and show it.

    Returns:
        The exit code: 0, 1 where the target is missed, 2 where the training cannot start.
    """
    salt = args.salt or secrets.token_hex(16)
    with ExitStack() as stack:
        try:
            training, held_out = load_digits()
            codec = ff.Codec(salt)
            recipe = Recipe(args.ranks, args.epochs, args.batch, args.seed, len(training.labels))
            capture = CaptureWriter(stack.enter_context(open(args.capture, "wb"))) if args.capture else None
        except ImportError as error:
            return _fail(f"the digits come with scikit-learn ({error}), an extra: pip install 'flodl_fast[demo]'")
        except (ValueError, OSError) as error:
            return _fail(str(error))
        traffic = Traffic(capture)
        progress = Progress(recipe, traffic)
        accuracy, _ = asyncio.run(train(codec, recipe, training, held_out, traffic, progress.row))
        progress.end(accuracy)
    if args.capture:
        print(f"Every frame is in {args.capture}; to read it:")
        print(f"  python -m flodl_fast inspect {shlex.quote(args.capture)} --salt {salt.strip()}")
    if accuracy < args.target:
        print(f"The held-out accuracy of {accuracy:.1%} misses the target of {args.target:.1%}.", file=sys.stderr)
        return 1
    return 0


def _fail(reason: str) -> int:
    print(f"flodl-fast demo: error: {reason}", file=sys.stderr)
    return 2

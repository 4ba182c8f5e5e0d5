"""A rank's whole life in a flodl cluster, averaging on the CPU (docs/wire.md §8; docs/worker.md shows it in use)."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsFloat, get_args

import numpy as np

from . import messages as wire
from .channel import Address, ControlChannel, DataChannel
from .convert import NewNcclSession, ShutdownWithSave, control_wire_to_msg
from .display import plural
from .environment import Environment
from .errors import ChannelClosed, ChannelError, FlodlError
from .frames import Codec
from .model import Arrays, Model, norm
from .net import Deadlines, Elapsed
from .protocol import BF16_SINCE, Revision, RoundKind
from .rounds import frame_ceiling, gamma_mass, mover_mass

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Plan", "Worker"]

HEARTBEAT = 1.0  # seconds between two beacons
NORM_EVERY = 10  # steps since the last average between two Batch messages with a parameter norm
NO_NORM = 1e-10  # up to here the crate takes parameters for zero, and their divergence is 0
SAMPLE_EVERY = 0.5  # seconds between two samples of resources at least
DRAIN = 1.0  # seconds at most of reading what still comes at the end

_CONTROL: tuple[type[wire.ControlMsg], ...] = get_args(wire.ControlMsg)

_logger = logging.getLogger(__name__)


class Plan:
    """A slice of an epoch to train on, from ``Worker.plans``; several plans may carry the same epoch.

    Attributes:
        epoch: the epoch, from 0 on.
        slices: [(offset, size), ...] in samples of the epoch's shuffled pick list. Where another rank has died,
            the coordinator appends to it while the plan is trained.
    """

    def __init__(self, worker: Worker, plan: wire.EpochPlan) -> None:
        self.epoch: int = plan.epoch
        self.slices: list[tuple[int, int]] = [(plan.partition_offset, plan.partition_size)]
        self._worker = worker
        self._batch_size: int | None = None
        self._taken = 0

    @property
    def size(self) -> int:
        """The number of samples, appended ones included."""
        return sum(size for _, size in self.slices)

    def batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """The plan's full batches; what is left at its end is dropped, as in the crate.

        Take a batch when its turn has come: slices that are appended meanwhile add batches. Ends early with the run.

        Args:
            batch_size: samples in a batch. It must be the coordinator's: outside the sync policy that waits for
                every sample of a plan, and makes plans of whole batches of its own.

        Returns:
            For each batch an int64 array of shape (batch_size,): positions in the epoch's shuffled pick list.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self._batch_size = batch_size
        return self._batches(batch_size)

    def _batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        while self._worker.ended is None and self._taken + batch_size <= self.size:
            batch = self._positions(self._taken, batch_size)
            self._taken += batch_size
            self._worker._clock = time.perf_counter()
            yield batch

    def _positions(self, start: int, count: int) -> NDArray[np.int64]:
        """What stands from ``start`` on where the slices are put one after the other."""
        parts = []
        for offset, size in self.slices:
            first, last = min(start, size), min(start + count, size)
            parts.append(np.arange(offset + first, offset + last, dtype=np.int64))
            start, count = start - first, count - (last - first)
        return np.concatenate(parts)

    def __repr__(self) -> str:
        return f"Plan(epoch={self.epoch}, slices={self.slices})"


class Worker:
    """One rank: takes plans, reports batches, averages its parameters with the cohort's when the coordinator asks.

    Averages are written into the caller's arrays, inside ``step``, ``serve`` and ``plans`` and nowhere else. All
    methods belong to one thread; heartbeats have a thread of their own. As a context manager it ends the rank's
    life: after a Shutdown with Exiting, on an exception without it, so that the coordinator takes the rank for
    dead; leave the process with a code other than 0 then.

    Args:
        params: the model's parameters: writable float32 arrays, of the same shapes and order at all ranks. NumPy
            arrays, tensors of PyTorch (``model.parameters()`` as it is), CUDA arrays, or anything with writable memory
            by buffer protocol or, from NumPy 2.1 on, DLPack. They are never replaced: train them in place. A mapping
            gives their names, too, which 0.8 compares. Or all of a model at once: ``flodl_fast.torch.Model(module)``,
            ``flodl_fast.jax.Model(tree)``.
        rank: the rank to be.
        world: the number of ranks of the cluster.
        codec: the Codec of the cluster.
        data: (host, port) of the relay's data port on loopback, or of the controller's port; or a connected socket.
        control: the same for the relay's control port, or the controller's again.
        host: None through a relay; where the controller is dialled, the name of a host of which this is the rank.
        buffers: float32 arrays that are no parameters, such as running statistics, averaged over the ranks that
            have trained. Those of other dtypes stay local: leave them out of a list; a mapping has all, by name. None
            beside a Model.
        model_sig: what a rank of 0.8 tells of its model, and all ranks must tell the same: the 32 bytes of
            ``flodl_fast.model_sig``; if None, a Model's or that of the mappings. Not told before 0.8.
        formation: begin with rank 0's values everywhere. All ranks of a cluster must agree on it: those of the
            crate's own trainer always do it, and where some do and others do not, both wait for ever.
        gamma: the cluster's exponent of work: parameters count with steps ** gamma.
        alpha: the elastic blend of the cluster's async policy, above 0 and at most 1: the share of the way to the
            average that the parameters go. None adopts the average.
        bf16_wire: parameters and buffers travel in bfloat16 where they are averaged (0.7 on), rounded to it at each
            end; they are added up in float32. All ranks of a cluster must agree on it.
        deadlines: other waits than ``Deadlines()``.
        on_checkpoint: called with the version where this rank is to save a checkpoint. An exception is reported to
            the coordinator, which then tries another rank.
        on_eval: called with the epoch where this rank is to evaluate; returns the metric. An exception is reported.
        on_epoch: called with the epoch before its first plan, at the rank that has the role of doing so.
        on_consensus_save: called where this rank is to save the model as it is.
        on_shutdown_save: called with a SaveReason where the run ends and the rank is to save before.
        on_message: called with every message of the coordinator once it has been served.
        resources: called for each report to the coordinator; returns a ResourceSample of this rank's host.
        sample_resources: from 0.7 on, call it between the reports as well and tell the coordinator: with a step, where
            the last time is 500 ms ago.

    Attributes:
        rank: as given.
        world: as given.
        params: float32 arrays on the host, as a tuple: the caller's own memory, or, of tensors elsewhere, their values
            at the last average.
        buffers: likewise.
        steps: the number of steps so far.
        ended: None while the run goes on, then what ended it: a Shutdown, a ShutdownWithSave with its SaveReason, or
            an exception.
        epoch_metrics: the cohort's EpochMetrics of the epoch that was finished last, or None.
        evaluation: the EvalBroadcast that came last, or None.
        advisory: the StageAdvisory that came last, what this rank may prefetch, or None.

    Raises:
        TypeError: an array that is not float32, not writable, or without memory to share; or a codec that is none.
        ValueError: no parameters, two tensors that share memory, a rank that is not in the world, ``bf16_wire`` at 0.6,
            or at 0.8 neither names nor ``model_sig``.
        ChannelError, DecodeError: as the channels' ``connect`` and, for the formation, ``broadcast``.
    """

    def __init__(
        self,
        params: Mapping[str, Any] | Iterable[Any] | Model,
        *,
        rank: int,
        world: int,
        codec: Codec,
        data: Address | socket.socket,
        control: Address | socket.socket,
        host: str | None = None,
        buffers: Mapping[str, Any] | Iterable[Any] = (),
        model_sig: bytes | None = None,
        formation: bool = True,
        gamma: float = 1.0,
        alpha: float | None = None,
        bf16_wire: bool = False,
        deadlines: Deadlines | None = None,
        on_checkpoint: Callable[[int], object] | None = None,
        on_eval: Callable[[int], float] | None = None,
        on_epoch: Callable[[int], object] | None = None,
        on_consensus_save: Callable[[], object] | None = None,
        on_shutdown_save: Callable[[wire.SaveReason], object] | None = None,
        on_message: Callable[[wire.ControlMsg], object] | None = None,
        resources: Callable[[], wire.ResourceSample] | None = None,
        sample_resources: bool = False,
    ) -> None:
        if not isinstance(codec, Codec):
            raise TypeError(f"codec: expected a Codec, got {type(codec).__name__}")
        self.rank = rank
        self.world = world
        self.steps = 0
        self.ended: wire.Shutdown | ShutdownWithSave | BaseException | None = None
        self.epoch_metrics: wire.EpochMetrics | None = None
        self.evaluation: wire.EvalBroadcast | None = None
        self.advisory: wire.StageAdvisory | None = None
        self._on_checkpoint = on_checkpoint
        self._on_eval = on_eval
        self._on_epoch = on_epoch
        self._on_consensus_save = on_consensus_save
        self._on_shutdown_save = on_shutdown_save
        self._on_message = on_message
        self._resources = resources
        self._samples = sample_resources and codec.revision >= Revision.V0_7
        self._sampled = -math.inf
        self._deadlines = deadlines or Deadlines()
        self._plans: deque[Plan] = deque()
        self._plan: Plan | None = None
        self._tally = _Tally()
        self._warned = False  # of a plan of which nothing was trained
        self._left = math.nan  # the parameters' norm as the last average left them
        self._rest_told = False  # that steps do not change them
        self._scalars: dict[str, tuple[float, int]] = {}
        self._clock = 0.0  # when the batch at hand began
        self._since_average = 0
        self._global_step = 0
        self._throttled = False
        self._epoch_role: int | None = None
        self._last_epoch: int | None = None
        model = Model.of(params, buffers)
        signature = _signature(codec.revision, model_sig, model)
        if bf16_wire and codec.revision < BF16_SINCE:
            raise ValueError(f"revision {codec.revision.value} has no bf16_wire, which came with {BF16_SINCE.value}")
        self._model = _Averaging(model, gamma, alpha, "bf16" if bf16_wire else None)
        self._stop = threading.Event()
        with ExitStack() as opened:
            self._data = opened.enter_context(
                DataChannel.connect(data, codec, rank, world, host=host, deadlines=self._deadlines)
            )
            if formation:
                self._model.form(self._data)
            self._control = opened.enter_context(
                ControlChannel.connect(
                    control, codec, rank, world, host=host, model_sig=signature, deadlines=self._deadlines
                )
            )
            opened.pop_all()
        self._heart = threading.Thread(target=self._beat, name=f"heartbeat of flodl rank {rank}", daemon=True)
        self._heart.start()

    @classmethod
    def from_env(
        cls,
        params: Mapping[str, Any] | Iterable[Any] | Model,
        *,
        buffers: Mapping[str, Any] | Iterable[Any] = (),
        environment: Environment | None = None,
        **options: Any,
    ) -> Worker:
        """The rank that a flodl launcher, or ``python -m flodl_fast join``, has started this process to be.

        Args:
            params: as for ``Worker``.
            buffers: as for ``Worker``.
            environment: what ``Environment.read()`` gives, read here if None.
            options: the keywords of ``Worker`` from ``model_sig`` on.

        Raises:
            ValueError: as ``Environment.read``.
            TypeError, ValueError, ChannelError, DecodeError: as ``Worker``.
        """
        env = environment or Environment.read()
        model = Model.of(params, buffers)
        options.setdefault("sample_resources", env.rank_resources)
        return cls(
            model,
            rank=env.rank,
            world=env.world,
            codec=Codec(env.salt, env.revision, frame_ceiling=frame_ceiling(model.nbytes)),
            data=env.data,
            control=env.control,
            host=f"{env.host}/{env.rank}" if env.direct else None,
            **options,
        )

    def __repr__(self) -> str:
        state = "running" if self.ended is None else f"ended by {self.ended!r}"
        return f"Worker(rank {self.rank} of {self.world}, {plural(self.steps, 'step')}, {state})"

    @property
    def params(self) -> Arrays:
        """The parameters in use."""
        return self._model.params.arrays

    @property
    def buffers(self) -> Arrays:
        """The float buffers in use."""
        return self._model.buffers.arrays

    # -- training

    @property
    def global_step(self) -> int:
        """The base of a learning-rate schedule: the cohort's batches up to its last average, plus this rank's since."""
        return self._global_step + self._since_average

    def plans(self) -> Iterator[Plan]:
        """The plans to train, as the coordinator hands them out; ends where it ends the run.

        While it waits it serves the coordinator, averages included. Going on to the next plan reports the last one.

        Raises:
            ChannelClosed: coordinator or relay are gone without a Shutdown, or the worker has been closed.
            ChannelError, DecodeError: as ``ControlChannel.recv`` and ``DataChannel.all_reduce``.
            Exception: whatever a callback raises, those for checkpoints and evaluations excepted.

        After any error the worker is closed.
        """
        while (plan := self._next_plan()) is not None:
            yield plan

    def step(
        self,
        loss: SupportsFloat,
        *,
        batch_ms: float | None = None,
        data_ms: float = 0.0,
        lr: float | None = None,
        samples: int | None = None,
    ) -> bool:
        """Report a trained batch and serve the coordinator: afterwards the parameters may be the cohort's average.

        Args:
            loss: the batch's loss.
            batch_ms: milliseconds of computing; if None, since ``Plan.batches`` gave the batch, less ``data_ms``.
            data_ms: milliseconds that the batch was waited for.
            lr: the learning rate, where the coordinator should know it.
            samples: the batch's samples, where it did not come from ``Plan.batches``.

        Returns:
            Whether the run goes on.

        Raises:
            RuntimeError: no plan is being trained, or the batch's size is not known.
            TypeError, ValueError: a value that is no number; nothing was reported.
            ChannelError, DecodeError, Exception: as ``plans``.
        """
        self._check()
        if self.ended is not None:
            return False
        if self._plan is None:
            raise RuntimeError("step() is for the batches of a plan: none is being trained")
        if samples is None:
            samples = self._plan._batch_size
        if samples is None:
            raise RuntimeError("step() needs samples= where the batch did not come from Plan.batches")
        if batch_ms is None:
            batch_ms = max(0.0, (time.perf_counter() - self._clock) * 1e3 - data_ms)
        loss, lr = _number("loss", loss), None if lr is None else _number("lr", lr)
        norm = self._model.norm() if (self._since_average + 1) % NORM_EVERY == 0 else None
        self._send(wire.Batch(self.rank, batch_ms, data_ms, self.steps + 1, norm, loss))
        if lr is not None:
            self._send(wire.LrUpdate(self.rank, lr))
        self.steps += 1
        self._since_average += 1
        self._tally.add(samples, loss, batch_ms, data_ms)
        with self._ending_on_error():
            self._sample()
        self.serve()
        self._clock = time.perf_counter()
        return self.ended is None

    def serve(self) -> None:
        """Serve what the coordinator has asked for, averages included; while it throttles this rank, until it lets go.

        ``step`` and ``plans`` do so. Call it where neither is called for long, and the other ranks need not wait.

        Raises:
            ChannelError, DecodeError, Exception: as ``plans``.
        """
        self._check()
        with self._ending_on_error():
            while self.ended is None and self._serve_one(None if self._throttled else 0.0):
                pass

    def log(self, name: str, value: float) -> None:
        """Add a value to a scalar of the next report; the cohort's mean comes back in ``epoch_metrics``.

        Args:
            name: the scalar's name.
            value: the value; the report carries the sum and the number of them.
        """
        total, count = self._scalars.get(name, (0.0, 0))
        self._scalars[name] = (total + float(value), count + 1)

    # -- asking and telling

    def request_eval(self) -> None:
        """Ask for an evaluation, by a rank of the coordinator's choice, before the next epoch."""
        self._send(wire.Intent(self.rank, wire.IntentKind.EVAL_NOW))

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint, by a rank of the coordinator's choice, before the next epoch."""
        self._send(wire.Intent(self.rank, wire.IntentKind.CHECKPOINT_NOW))

    def dashboard(
        self,
        *,
        port: int | None = None,
        svg: str | None = None,
        label: str | None = None,
        hash: str | None = None,
        metadata: str | None = None,
        hardware: str | None = None,
    ) -> None:
        """Tell the launcher's dashboard about this rank; what is None is not told.

        At 0.6 there is a dashboard only where a rank has told a port; from 0.7 on the rest is archived without one.

        Args:
            port: the port to serve the dashboard at.
            svg: a drawing of the model; without it ``label`` and ``hash`` are not told either.
            label: its caption.
            hash: what tells one model from another.
            metadata: JSON text to show.
            hardware: this rank's hardware in words.

        Raises:
            EncodeError, TypeError: as ``Codec.encode``.
            ChannelError: as ``ControlChannel.send``.
        """
        if port is not None:
            self._send(wire.DashboardRegister(self.rank, port))
        if svg is not None:
            self._send(wire.DashboardSetSvg(self.rank, svg, label, hash))
        if metadata is not None:
            self._send(wire.DashboardSetMetadata(self.rank, metadata))
        if hardware is not None:
            self._send(wire.DashboardSetHardware(self.rank, hardware))

    # -- the end

    def close(self) -> None:
        """End the rank's life: say Exiting if the coordinator has ended the run, and close. Again does nothing.

        Before a Shutdown this takes the rounds from all ranks (docs/wire.md §8).
        """
        self._stop.set()
        try:
            if isinstance(self.ended, (wire.Shutdown, ShutdownWithSave)) and not self._control.closed:
                self._say_goodbye()
        finally:  # also where a signal handler raises
            self._control.close()
            self._data.close()
            self._heart.join()

    def _say_goodbye(self) -> None:
        self._heart.join()
        try:
            self._control.send(wire.Exiting(self.rank))
            # What is unread at the close could make the system reset the connection and lose this.
            until = time.monotonic() + DRAIN
            while time.monotonic() < until:
                self._control.recv(0)
        except (Elapsed, FlodlError) as error:
            _logger.debug("rank %d: while closing: %s", self.rank, error)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        early = self.ended is None
        if error is not None:
            self.ended = error
        self.close()
        if early and error is None:
            raise RuntimeError(f"rank {self.rank} leaves before the coordinator's Shutdown: the run cannot go on")

    def _check(self) -> None:
        if isinstance(self.ended, BaseException):
            raise ChannelClosed(f"rank {self.rank} has ended: {self.ended}") from self.ended

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """An error ends the rank: without its heartbeats the coordinator will see so, whatever the caller does."""
        try:
            yield
        except BaseException as error:
            self.ended = error
            self.close()
            raise

    # -- the control channel

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                self._control.send(wire.Heartbeat(self.rank, count))
            except ChannelError:
                return  # The training thread meets the same at its next call.
            if self._stop.wait(HEARTBEAT):
                return

    def _send(self, message: wire.Message) -> None:
        try:
            self._control.send(message)
        except ChannelError as error:
            self.ended = self.ended or error
            self.close()
            raise

    def _sample(self) -> None:
        if self._samples and self._resources is not None and time.monotonic() - self._sampled >= SAMPLE_EVERY:
            self._sampled = time.monotonic()
            self._send(wire.TimingResourceSample(self.rank, self._resources()))

    def _serve_one(self, timeout: float | None) -> bool:
        """Serve the next message; False if none came in time."""
        try:
            message = self._control.recv(timeout, liveness=self._deadlines.liveness)
        except Elapsed:  # and not a TimeoutError of a signal handler's
            return False
        if not isinstance(message, _CONTROL):
            _logger.warning("rank %d: dropped a %s: no coordinator sends it", self.rank, type(message).__name__)
            return True
        self._handle(message)
        if self._on_message is not None:
            self._on_message(message)
        return True

    def _handle(self, received: wire.ControlMsg) -> None:
        if isinstance(received, wire.Update):
            self._throttled = False
            if received.next_plan is not None:
                self._plans.append(Plan(self, received.next_plan))
        match control_wire_to_msg(received):
            case wire.StartEpoch(plan):
                self._plans.append(Plan(self, plan))
            case wire.ExtendPartition(offset, size):
                self._extend(offset, size)
            case wire.RequestParams():
                self._average()
            case wire.Throttle():
                self._throttled = True
            case wire.SetGlobalStep(step):
                self._global_step = step
            case wire.SetEpochCallbackRole(rank):
                self._epoch_role = rank
            case wire.Checkpoint(version, self.rank):
                _, elapsed, failure = _attempt("on_checkpoint", self._on_checkpoint, version)
                self._send(wire.CheckpointResult(self.rank, version, elapsed, failure))
            case wire.ExecuteEvalCallback(schedule, epoch, self.rank):
                value, elapsed, failure = _attempt("on_eval", self._on_eval, epoch, float)
                metric = math.nan if value is None else value
                self._send(wire.EvalResult(self.rank, schedule, epoch, metric, elapsed, failure))
            case wire.SaveConsensusModel(self.rank) if self._on_consensus_save is not None:
                self._on_consensus_save()
            case wire.EpochAggregated(metrics):
                self.epoch_metrics = metrics
            case wire.EvalBroadcast() as evaluation:
                self.evaluation = evaluation
            case wire.StageAdvisory() as advisory:
                self.advisory = advisory
            case wire.Shutdown() as end:
                self.ended = end
            case ShutdownWithSave(reason) as end:
                if self._on_shutdown_save is not None:
                    self._on_shutdown_save(reason)
                self.ended = end
            case wire.SyncNow() | wire.RequestNewNcclId() | NewNcclSession():
                raise ChannelError("the coordinator averages by NCCL, this worker only on the CPU")

    def _average(self) -> None:
        steps = self._since_average
        self._model.pull()
        self._send(wire.SnapshotReady(self.rank))
        divergence, after, before = self._model.average(self._data, steps)
        if steps and before == self._left and not self._rest_told:
            self._rest_told = True
            _logger.warning(
                "rank %d: %d steps have left the parameters as the average before made them: "
                "are the Worker's own arrays trained, in place?", self.rank, steps,
            )
        self._left = after
        self._since_average -= steps
        self._send(wire.SyncAck(self.rank, 0, divergence, after, before))

    # -- plans

    def _next_plan(self) -> Plan | None:
        self._check()
        with self._ending_on_error():
            self._finish_plan()
            while self.ended is None:
                if self._plans and not self._throttled:
                    self._begin_plan(self._plans.popleft())
                    return self._plan
                self._serve_one(None)
        return None

    def _begin_plan(self, plan: Plan) -> None:
        if plan.epoch != self._last_epoch:
            self._last_epoch = plan.epoch
            if self._on_epoch is not None and self._epoch_role == self.rank:
                started = time.perf_counter()
                self._on_epoch(plan.epoch)
                self._send(wire.EpochFnElapsed(self.rank, plan.epoch, (time.perf_counter() - started) * 1e3))
        self._plan = plan
        self._clock = time.perf_counter()
        self._tally = _Tally(self._clock)

    def _finish_plan(self) -> None:
        plan, self._plan = self._plan, None
        if plan is None or self.ended is not None:
            return
        if not self._tally.batches and not self._warned:
            self._warned = True
            what = "no step() for any of its batches"
            if not plan._taken:
                what = "no batch taken" if plan._batch_size is None else f"no full batch of {plan._batch_size}"
            _logger.warning("rank %d: nothing was trained of a plan of %d samples: %s", self.rank, plan.size, what)
        scalars, self._scalars = self._scalars, {}
        resources = self._resources() if self._resources is not None else None
        self._send(self._tally.report(self.rank, plan.epoch, scalars, resources))

    def _extend(self, offset: int, size: int) -> None:
        plan = self._plan or next(iter(self._plans), None)  # a throttled rank's plan may be yet to begin
        if plan is not None:
            plan.slices.append((offset, size))
        else:  # The plan's report is out, and the coordinator takes but one of an epoch. The crate loses these, too.
            _logger.warning("rank %d: dropped %d samples of a dead rank: the plan is finished", self.rank, size)


@dataclass(slots=True)
class _Tally:
    """What a plan's report sums up; times in milliseconds, but for the clock at its start."""

    started: float = 0.0
    batches: int = 0
    samples: int = 0
    loss: float = 0.0
    compute_ms: float = 0.0
    data_ms: float = 0.0

    def add(self, samples: int, loss: float, compute_ms: float, data_ms: float) -> None:
        self.batches += 1
        self.samples += samples
        self.loss += loss
        self.compute_ms += compute_ms
        self.data_ms += data_ms

    def report(
        self, rank: int, epoch: int, scalars: dict[str, tuple[float, int]], resources: wire.ResourceSample | None
    ) -> wire.MetricsMsg:
        return wire.MetricsMsg(
            rank,
            epoch,
            avg_loss=self.loss / self.batches if self.batches else 0.0,
            batches_processed=self.batches,
            epoch_ms=(time.perf_counter() - self.started) * 1e3,
            samples_processed=self.samples,
            share_complete_ms=self.compute_ms + self.data_ms,
            compute_only_ms=self.compute_ms,
            data_starve_ms=self.data_ms,
            scalars=scalars,
            resources=resources,
        )


class _Averaging:
    """The crate's arithmetic of averaging, on the model of a rank."""

    def __init__(self, model: Model, gamma: float, alpha: float | None, wire: str | None) -> None:
        if alpha is not None and not 0 < alpha <= 1:
            raise ValueError(f"alpha must be above 0 and at most 1, got {alpha}")
        self.params = model.params
        self.buffers = model.buffers
        self._gamma = gamma
        self._alpha = alpha
        # Adoption waits until both rounds have succeeded, and a reply lies in the channel's memory only until the next
        # round: that of the parameters is kept where buffers follow. So is what comes in bfloat16, as float32.
        self._wire = wire
        self._kept_params = _like(model.params.arrays) if len(model.buffers) or wire else None
        self._kept_buffers = _like(model.buffers.arrays) if wire else None

    def norm(self) -> float:
        return self.params.norm()

    def form(self, data: DataChannel) -> None:
        """Take rank 0's values."""
        self.pull()
        for tensors in (self.params, self.buffers):
            if len(tensors):
                tensors.adopt(data.broadcast(tensors.arrays, root=0, view=True).tensors)

    def pull(self) -> None:
        """Begin to take the model's values, for ``average``; those of tensors elsewhere are on their way then."""
        self.params.pull()
        self.buffers.pull()

    def average(self, data: DataChannel, steps: int) -> tuple[float, float, float]:
        """Join the cohort's rounds with so many steps of work and adopt what comes of them.

        On any error the tensors are as they were.

        Returns:
            The relative distance of the average from the parameters before, its norm, and theirs.
        """
        trained = data.gather(steps).any()
        params = own = self.params.arrays
        if trained:
            params = self._reduce(data, own, gamma_mass(steps, self._gamma), self._kept_params)
        buffers = self.buffers.arrays  # which may have been on their way until now
        if trained and buffers:
            buffers = self._reduce(data, buffers, mover_mass(steps), self._kept_buffers)
        before, after, distance = norm(own), norm(params), norm(own, params)
        self.params.adopt(params, self._alpha)
        self.buffers.adopt(buffers)
        return distance / after if after > NO_NORM else 0.0, after, before

    def _reduce(self, data: DataChannel, arrays: Arrays, mass: float, out: Arrays | None) -> Arrays:
        """The cohort's average of these arrays, or the arrays themselves where no rank's counts.

        It is in ``out``, or if that is None in the channel's memory.
        """
        reply = data.all_reduce(arrays, RoundKind.MODEL, mass, out, scale=mass, view=out is None, wire=self._wire)
        return tuple(reply.tensors) if reply.realized else arrays


def _like(arrays: Arrays) -> Arrays:
    return tuple(np.empty(array.shape, np.float32) for array in arrays)


def _signature(revision: Revision, model_sig: bytes | None, model: Model) -> bytes | None:
    """What the rank tells of its model."""
    if revision < Revision.V0_8:
        return None
    model_sig = model_sig or model.sig
    if model_sig is None:
        raise ValueError(
            f"revision {revision.value} compares the models of all ranks by their names: give parameters (and buffers) "
            "as mappings of names to arrays, such as dict(model.named_parameters()), or as a Model, or give model_sig="
        )
    return model_sig


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: expected one number, got {type(value).__name__}: {error}") from None


def _attempt(
    name: str, callback: Callable[[int], Any] | None, argument: int, take: Callable[[Any], Any] | None = None
) -> tuple[Any, float, str | None]:
    """(result, milliseconds, error text) of a callback whose failure is the coordinator's to deal with.

    Args:
        name: what to call it in an error.
        callback: the callback, if there is one.
        argument: what it is called with.
        take: what makes the result of what it returns.
    """
    if callback is None:
        return None, 0.0, f"this rank has no {name}"
    result = failure = None
    started = time.perf_counter()
    try:
        answer = callback(argument)
        result = answer if take is None else take(answer)
    except Exception as error:
        _logger.exception("%s(%d) failed", name, argument)
        failure = f"{type(error).__name__}: {error}"
    return result, (time.perf_counter() - started) * 1e3, failure

"""An embedded controller and coordinator for the ranks of one machine (docs/wire.md §7, §8; docs/cluster.md).

For tests, demonstrations and notebooks: it speaks the crate's wire, hands out epochs under the Sync policy and averages
by realized work. A run over several machines wants the crate's own controller: it schedules by measured speed, keeps
checkpoints and resumes, none of which happens here.

Each connection has a thread that reads it; ``_Reducer`` answers rounds in one, ``_Coordinator`` messages in another.
"""

from __future__ import annotations

import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal, cast

from . import messages as wire
from . import protocol
from .channel import Address, ControlChannel, DataChannel, accept
from .display import one_line, plural
from .environment import CLUSTER, HOST_NAME, LOCAL_RANK, RELAY_CONTROL, RELAY_DATA, REVISION, ROUTE
from .errors import ChannelClosed, ChannelError, FlodlError, HandshakeError, TensorError
from .frames import Codec
from .layout import variants_of
from .net import scaled
from .rounds import RoundFold, RoundFrame

__all__ = ["LocalCluster", "LocalResult", "aggregate_metrics"]

BEACON = 1.0  # seconds between two CoordHeartbeats
CEILING = 300  # seconds that an averaging cycle may take, or ten heartbeat timeouts where that is longer
FINAL_EVALUATION = 2**64 - 1  # its schedule_id
_PORTS = (0, RELAY_DATA, RELAY_CONTROL)  # served, counted from the controller's
_LAST_PORT = 65535 - max(_PORTS)
_PORT_ATTEMPTS = 100
_ACCEPT_POLL = 0.1  # seconds until the listening thread sees that it is to end

_OF_RANKS: tuple[type[wire.TimingMsg | wire.MetricsMsg], ...] = (
    *(message for message, _ in variants_of(wire.TimingMsg)),
    wire.MetricsMsg,
)

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LocalResult:
    """What a run came to.

    Attributes:
        epochs: the cohort's EpochMetrics of each epoch.
        evaluations: the ranks' EvalResults as they came.
        checkpoints: the ranks' CheckpointResults as they came.
        averages: the number of averaging cycles.
        global_step: the batches that the cohort trained up to the last of them.
        dead: why each dead rank was taken for dead, by rank.
        reason: why the run was ended with a save, None where it was not.
    """

    epochs: list[wire.EpochMetrics] = field(default_factory=list)
    evaluations: list[wire.EvalResult] = field(default_factory=list)
    checkpoints: list[wire.CheckpointResult] = field(default_factory=list)
    averages: int = 0
    global_step: int = 0
    dead: dict[int, str] = field(default_factory=dict)
    reason: wire.SaveReason | None = None

    __repr__ = one_line


class LocalCluster:
    """A run on this machine: serves ranks from ``with`` on, and is over when the last one has left.

    Ranks come to one port directly, or to two as to their host's relay, mixed as they like. The run begins when all of
    them are there. A rank whose connection ends without Exiting, or that is silent for too long, is dead: it is out of
    every round from then on, and what it had left of its epoch goes to the others. As with the crate, its share of
    later epochs is not trained.

    Args:
        world: the number of ranks.
        samples: the number of samples of an epoch, split evenly.
        batch: the samples of a batch; the ranks must use the same.
        epochs: the number of epochs.
        salt: the session salt as ``Codec`` takes it; a new one if None.
        revision: the wire's. At 0.8 all ranks must tell the same signature of their models.
        frame_ceiling: as ``Codec``'s; ``flodl_fast.frame_ceiling`` says what a model needs.
        host: the address to listen at. Whoever reaches it and has the salt takes part.
        port: the controller's port; the relay's two are 4 and 5 above it. 0 takes any.
        heartbeat_timeout: seconds without a Timing message after which a rank is dead; the crate's if None.
        dial_in: seconds from the start until all ranks must be there; the crate's if None.
        evaluate_every: have a rank evaluate before every so many epochs, and at the end; 0 only where a rank asks.
        checkpoint_every: have a rank save a checkpoint before every so many epochs; 0 only where a rank asks.

    Attributes:
        address: (host, port) for direct ranks; the port is known from ``with`` on.
        salt: the 16 bytes of the session salt.

    Raises:
        ValueError: a number that cannot be, or a salt, revision or ceiling as ``Codec``.
        OSError: from ``with``: the ports are taken.
    """

    def __init__(
        self,
        world: int,
        samples: int,
        batch: int,
        epochs: int,
        *,
        salt: bytes | str | None = None,
        revision: protocol.Revision | str = "0.6",
        frame_ceiling: int = protocol.FRAME_CEILING,
        host: str = "127.0.0.1",
        port: int = 0,
        heartbeat_timeout: float | None = None,
        dial_in: float | None = None,
        evaluate_every: int = 0,
        checkpoint_every: int = 0,
    ) -> None:
        for name, value, least in (
            ("world", world, 1),
            ("samples", samples, 1),
            ("batch", batch, 1),
            ("epochs", epochs, 1),
            ("evaluate_every", evaluate_every, 0),
            ("checkpoint_every", checkpoint_every, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= port <= _LAST_PORT:
            raise ValueError(f"port must be from 0 to {_LAST_PORT}, got {port}: the relay's ports are above it")
        self.salt = secrets.token_bytes(protocol.SALT_SIZE) if salt is None else protocol.parse_salt(salt)
        self._world = world
        self._codec = Codec(self.salt, revision, frame_ceiling=frame_ceiling)
        self._reducer = _Reducer(world, self._lost, self._failed)
        self._coordinator = _Coordinator(
            _Recipe(world, samples, batch, epochs, evaluate_every, checkpoint_every, self._codec.revision),
            heartbeat_timeout=scaled(protocol.LIVENESS) if heartbeat_timeout is None else heartbeat_timeout,
            dial_in=scaled(protocol.DIAL_IN) if dial_in is None else dial_in,
            reducer=self._reducer,
        )
        self.address: Address = host, port
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []  # all that were ever accepted

    def __repr__(self) -> str:
        state = "over" if self._coordinator.over else "running" if self._threads else "not started"
        return f"LocalCluster({plural(self._world, 'rank')}, {state}, at {self.address[0]}:{self.address[1]})"

    @property
    def relay_ports(self) -> tuple[int, int]:
        """The ports, data and control, for ranks that dial their host's relay."""
        _, data, control = (self.address[1] + offset for offset in _PORTS)
        return data, control

    def environment(self, rank: int, *, route: Literal["direct", "relay"] = "direct") -> dict[str, str]:
        """The environment variables that make a process of this machine this rank, to add to its others.

        Args:
            rank: the rank.
            route: "direct" to dial the controller's port, "relay" to dial ``relay_ports`` as if there were a relay.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self._world:
            raise ValueError(f"rank {rank} is not in a world of {self._world}")
        host, port = self.address
        name = "localhost"
        envelope = {
            "controller": {"host": host, "port": port},
            "world_size": self._world,
            "num_workers": 1,
            "salt": self.salt.hex(),
            "worker": {
                "host": name,
                "ranks": list(range(self._world)),
                "local_devices": "all",
                "nccl_socket_ifname": "",
                "path": ".",
            },
        }
        return {
            CLUSTER: json.dumps(envelope).encode().hex(),
            LOCAL_RANK: str(rank),
            HOST_NAME: name,
            ROUTE: route,
            REVISION: self._codec.revision.value,
        }

    def epochs(self) -> Iterator[wire.EpochMetrics]:
        """The cohort's metrics of each epoch as it ends, from the first on; ends with the run.

        Raises:
            ChannelError, TensorError: as ``wait``.
        """
        yield from self._coordinator.epochs()

    def wait(self, timeout: float | None = None) -> LocalResult:
        """Wait until the run is over.

        Args:
            timeout: seconds to wait, None for no limit.

        Raises:
            TimeoutError: it is not in ``timeout`` seconds; wait again, or leave the ``with``.
            ChannelError: the run cannot go on: ranks did not come, one left before all were there, or none is left;
                ChannelClosed where the ``with`` was left before its end, HandshakeError where ranks tell different
                signatures of their models.
            TensorError: ranks whose tensors do not match each other's; the message names the rank.
        """
        return self._coordinator.wait(timeout)

    def stop(self, *, save: bool = False) -> None:
        """End the run early: ranks leave as after its last epoch, and who has not come yet finds the ports closed.

        Does not wait for them.

        Args:
            save: have them save first.
        """
        reason = wire.SaveReason.GRACEFUL_SHUTDOWN if save else None
        self._coordinator.post(self._coordinator.end, reason)

    def __enter__(self) -> LocalCluster:
        listeners = _listen(*self.address)
        self.address = listeners[0].getsockname()[:2]
        self._start(partial(self._listen, listeners))
        self._start(self._reducer.run)
        self._start(self._coordinator.run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the run up if it is not over, close all connections and end all threads."""
        self._failed(ChannelClosed("the cluster was closed before its run was over"))
        for thread in self._threads:  # Grows no more once the first of them, which listens, has ended.
            thread.join()

    # -- connections, each with a thread

    def _start(self, run: Callable[[], object]) -> None:
        thread = threading.Thread(target=run, name=f"flodl cluster {self.address[1]}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self, listeners: Sequence[socket.socket]) -> None:
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for listener in listeners:
                stack.enter_context(listener)
                selector.register(listener, selectors.EVENT_READ)
            while not self._coordinator.over:
                for key, _ in selector.select(_ACCEPT_POLL):
                    with suppress(BlockingIOError, ConnectionError):  # who dialled may be gone already
                        self._sockets.append(cast(socket.socket, key.fileobj).accept()[0])
                        self._start(partial(self._serve, self._sockets[-1]))
        for sock in self._sockets:
            with suppress(OSError):  # closed by now
                sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> None:
        try:
            channel = accept(sock, self._codec, self._world)
        except HandshakeError as error:
            _logger.warning("refused a connection: %s", error)
            self._coordinator.refusal = error
            return
        with channel:
            if isinstance(channel, ControlChannel):
                self._read(channel, self._coordinator.arrived, self._coordinator.received)
            elif isinstance(channel, DataChannel):
                self._read(channel, self._reducer.arrived, self._reducer.received)
            else:
                _logger.warning("refused a join agent: the ranks of a LocalCluster come by themselves")

    def _read(self, channel: Any, arrived: Callable[[Any], bool], received: Callable[[Any, Any], object]) -> None:
        if not arrived(channel):
            _logger.warning("refused ranks %s: one of them is there already", list(channel.ranks))
            return
        try:
            while True:
                message = channel.recv()
                if isinstance(message, wire.RelayRankExit):
                    self._lost((message.rank,), "its relay has lost it")
                else:
                    received(channel, message)
        except FlodlError as error:
            self._lost(channel.ranks, str(error))

    def _lost(self, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            self._coordinator.post(self._coordinator.lost, rank, why)

    def _failed(self, error: Exception) -> None:
        self._coordinator.post(self._coordinator.fail, error)


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets at the port, or any, and at the relay's two above it."""
    for _ in range(0 if port else _PORT_ATTEMPTS - 1):
        with suppress(OSError):
            return _listen_at(host, 0)
    return _listen_at(host, port)


def _listen_at(host: str, port: int) -> list[socket.socket]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((host, port)))]
        base = sockets[0].getsockname()[1]
        if base > _LAST_PORT:
            raise OSError(f"port {base} has no room above it for the relay's ports")
        for offset in _PORTS[1:]:
            sockets.append(stack.enter_context(socket.create_server((host, base + offset))))
        for listener in sockets:
            listener.setblocking(False)
        stack.pop_all()
        return sockets


# ------------------------------------------------------------------------------------------------------------ rounds


class _Reducer:
    """The round service: a frame from every host, their average back to all.

    Frames are added up in rank order as they come, so that results do not depend on who is faster and no frame is kept
    longer than the slowest rank below it takes.

    Args:
        world: the number of ranks.
        lost: called with ranks and why, where a host takes no result.
        failed: called with the error that ends the service.
    """

    def __init__(
        self, world: int, lost: Callable[[Sequence[int], str], None], failed: Callable[[Exception], None]
    ) -> None:
        self._world, self._lost, self._failed = world, lost, failed
        self._news = threading.Condition()
        self._hosts: dict[DataChannel, RoundFrame | None] = {}  # with what they have sent for this round
        self._gone: set[int] = set()
        self._untold: list[int] = []
        self._stopped = False

    def arrived(self, channel: DataChannel) -> bool:
        """Take a host in; False if one of its ranks is there already."""
        with self._news:
            if self._ranks().intersection(channel.ranks):
                return False
            self._hosts[channel] = None
            self._news.notify_all()
            return True

    def received(self, channel: DataChannel, frame: RoundFrame) -> None:
        """A host's frame for this round.

        Raises:
            ChannelError: the host has had its turn.
        """
        with self._news:
            if self._hosts[channel] is not None:
                raise ChannelError("a second frame came before the reply to the first")
            self._hosts[channel] = frame
            self._news.notify_all()

    def drop(self, rank: int) -> None:
        """Go on without a rank."""
        with self._news:
            self._gone.add(rank)
            self._untold.append(rank)
            self._news.notify_all()

    def stop(self) -> None:
        """End ``run``."""
        with self._news:
            self._stopped = True
            self._news.notify_all()

    def run(self) -> None:
        """Serve round after round until ``stop``; nobody else sends on the channels."""
        with self._news:
            self._news.wait_for(lambda: self._stopped or len(self._ranks()) == self._world)
            hosts = sorted(self._hosts, key=lambda channel: channel.ranks)
        try:
            while not self._stopped:
                self._round(hosts)
        except Exception as error:
            self._failed(error)

    def _round(self, hosts: Sequence[DataChannel]) -> None:
        fold, empty = RoundFold(), True
        for channel in hosts:
            frame = self._take(channel)
            if frame is None:
                continue
            ranks = ", ".join(map(str, channel.ranks))
            try:
                fold.add(frame, f"of rank {ranks}")
            except TensorError as error:
                raise TensorError(f"the frame of rank {ranks} does not fit those of lower ranks: {error}") from error
            empty = False
        if empty:
            with self._news:  # nobody is left, which the coordinator is about to see
                self._news.wait_for(lambda: self._stopped)
            return
        result = fold.reduce()
        for channel in hosts:
            if self._expected(channel):
                self._tell(channel, partial(channel.send, result))

    def _take(self, channel: DataChannel) -> RoundFrame | None:
        """A host's frame, once it is there; None where none will come."""

        def ready() -> bool:
            return self._hosts[channel] is not None or not self._expected(channel)

        while True:
            with self._news:
                self._news.wait_for(lambda: self._untold or ready())
                untold, self._untold = self._untold, []
                if not untold:
                    frame, self._hosts[channel] = self._hosts[channel], None
                    return frame if self._expected(channel) else None
            for rank in untold:  # Its relay would otherwise wait for it.
                for host in self._hosts:
                    if rank in host.ranks:
                        self._tell(host, partial(host.declare_dead, rank))

    def _tell(self, channel: DataChannel, send: Callable[[], None]) -> None:
        try:
            send()
        except ChannelError as error:
            self._lost(channel.ranks, str(error))

    def _expected(self, channel: DataChannel) -> bool:
        return not self._stopped and not self._gone.issuperset(channel.ranks)

    def present(self) -> set[int]:
        """The ranks that have a data channel now."""
        with self._news:
            return self._ranks()

    def _ranks(self) -> set[int]:
        return {rank for channel in self._hosts for rank in channel.ranks}


# ------------------------------------------------------------------------------------------------------- coordinator


@dataclass(frozen=True)
class _Recipe:
    """What the ranks are to do."""

    world: int
    samples: int
    batch: int
    epochs: int
    evaluate_every: int
    checkpoint_every: int
    revision: protocol.Revision

    def plan(self, epoch: int, rank: int) -> wire.EpochPlan:
        """A rank's slice of an epoch: the first ranks have one sample more where they do not divide evenly."""
        offset, size = _share(self.samples, self.world, rank)
        return wire.EpochPlan(epoch, offset, size)


def _share(total: int, parts: int, part: int) -> tuple[int, int]:
    """(offset, size) of one of the parts that a total is split into as evenly as can be, the first ones larger."""
    size, more = divmod(total, parts)
    return part * size + min(part, more), size + (part < more)


class _Rank:
    """What the coordinator knows of a rank that is there."""

    def __init__(self, channel: ControlChannel) -> None:
        self.channel = channel
        self.heard = time.monotonic()
        self.slices: list[tuple[int, int]] = []  # (offset, size) of its plan, and of what it has inherited
        self.steps = 0  # all that it has ever taken
        self.steps_before_plan = 0
        self.steps_since_average = 0
        self.averaged = 0  # of them, in the cycle at hand
        self.acknowledged = False  # its divergence of the cycle at hand is in
        self.reported = False  # its Metrics of the epoch at hand are in


class _Coordinator:
    """Hands out epochs, has the ranks average, gathers their metrics (docs/wire.md §8).

    ``run`` is a thread of its own, in which all happens but what is marked as for all threads; those ``post`` to it.
    """

    def __init__(self, recipe: _Recipe, *, heartbeat_timeout: float, dial_in: float, reducer: _Reducer) -> None:
        self._recipe, self._reducer = recipe, reducer
        self._timeout, self._dial_in = heartbeat_timeout, dial_in
        self.refusal: HandshakeError | None = None  # why the last connection that was refused was
        self._events: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._ranks: dict[int, _Rank] = {}  # those that are there and neither dead nor done
        self._arrived: set[int] = set()
        self._arriving = threading.Lock()
        self._left: set[int] = set()  # dead or done
        self._model: tuple[int, bytes] | None = None  # the rank that came first, and its model's signature
        self._epoch = -1
        self._reports: list[wire.MetricsMsg] | None = None  # of the epoch at hand, None once it is over
        self._cycle: float | None = None  # when the averaging cycle at hand began
        self._role = 0  # the rank of the per-epoch callback, evaluations and checkpoints
        self._role_told = False
        self._wanted: set[wire.IntentKind] = set()
        self._tried: set[int] = set()  # ranks whose checkpoint failed
        self._evaluating: int | None = None  # the rank whose final evaluation is awaited
        self._evaluated = False
        self._ending = False
        # What other threads see.
        self._news = threading.Condition()
        self._epochs: list[wire.EpochMetrics] = []
        self._result = LocalResult(self._epochs)
        self._error: Exception | None = None
        self.over = False

    # -- for all threads

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have the coordinator's thread call this."""
        self._events.put((call, args))

    def arrived(self, channel: ControlChannel) -> bool:
        """Take ranks in; False if one of them is there already."""
        with self._arriving:
            if self._arrived.intersection(channel.ranks):
                return False
            self._arrived.update(channel.ranks)
        self.post(self._admit, channel)
        return True

    def received(self, channel: ControlChannel, message: wire.Message) -> None:
        """A message of a rank."""
        self.post(self._handle, message)

    def epochs(self) -> Iterator[wire.EpochMetrics]:
        """As LocalCluster's."""
        count = 0
        while True:
            with self._news:
                while not self.over and len(self._epochs) == count:
                    self._news.wait()
                new = self._epochs[count:]
            if not new:
                self.wait(None)
                return
            yield from new
            count += len(new)

    def wait(self, timeout: float | None) -> LocalResult:
        """As LocalCluster's."""
        with self._news:
            if not self._news.wait_for(lambda: self.over, timeout):
                raise TimeoutError(f"the run is not over in {timeout} s")
        if self._error is not None:
            raise self._error
        return self._result

    # -- the coordinator's thread

    def run(self) -> None:
        """From the first rank to the last one's Exiting."""
        started = next_beacon = time.monotonic()
        try:
            while self._ranks or not self._ending:
                try:
                    call, args = self._events.get(timeout=max(0.0, next_beacon - time.monotonic()))
                except Empty:
                    pass
                else:
                    call(*args)
                now = time.monotonic()
                if now >= next_beacon:
                    next_beacon = now + BEACON
                    self._broadcast(wire.CoordHeartbeat())
                    self._check_silence(now)
                if self._epoch < 0 and not self._ending:
                    self._form(now - started)
                else:
                    self._go_on(now)
        except Exception as error:
            self._error = error
        finally:
            self._reducer.stop()
            with self._news:
                self.over = True
                self._news.notify_all()

    def fail(self, error: Exception) -> None:
        """End the run with an error."""
        raise error

    def lost(self, rank: int, why: str) -> None:
        """A rank is gone without Exiting, which is its death unless the run is ending."""
        left = self._ranks.pop(rank, None)
        if left is None and rank in self._left:
            return  # dead or done before
        if not self._ending:
            if self._epoch < 0:
                raise ChannelError(f"rank {rank} left before all ranks were there: {why}")
            _logger.warning("rank %d is dead: %s", rank, why)
            self._result.dead[rank] = why
        self._leave(rank, left)

    def end(self, reason: wire.SaveReason | None = None) -> None:
        """Have the ranks leave, with a save where there is a reason for one."""
        if not self._ending:
            self._ending = True
            self._result.reason = reason
            self._broadcast(wire.Shutdown() if reason is None else wire.ShutdownWithSave(reason))

    def _admit(self, channel: ControlChannel) -> None:
        for rank, signature in zip(channel.ranks, channel.model_sigs, strict=False):  # a relay may tell none
            first, expected = self._model = self._model or (rank, signature)
            if signature != expected:
                raise HandshakeError(
                    f"rank {rank} trains another model than rank {first}: names, shapes or dtypes of its parameters or "
                    f"buffers differ (signatures {signature.hex()[:16]}… and {expected.hex()[:16]}…)"
                )
        for rank in channel.ranks:
            self._ranks[rank] = _Rank(channel)
            if self._ending:  # too late to train, not to be told so
                self._send(rank, wire.Shutdown())

    def _form(self, waited: float) -> None:
        missing = sorted(set(range(self._recipe.world)).difference(self._ranks))
        if not missing:
            self._start_epoch(0)
        elif waited > self._dial_in:
            # A rank dials its data channel first, and its control channel once all have formed over that.
            half = sorted(self._reducer.present().intersection(missing))
            absent = sorted(set(missing).difference(half))
            if self._ranks and not absent:
                raise ChannelError(
                    f"ranks {half} still wait in the rounds of their formation after {self._dial_in} s, ranks "
                    f"{sorted(self._ranks)} do not: all must agree on formation= and on whether they have buffers"
                )
            waiting = f"; ranks {half} wait for them in their first round" if half and absent else ""
            refused = f"; the last connection that was refused: {self.refusal}" if self.refusal else ""
            raise ChannelError(f"ranks {absent or missing} have not come in {self._dial_in} s{waiting}{refused}")

    def _go_on(self, now: float) -> None:
        ranks = self._ranks.values()
        if self._ending:
            return
        if self._cycle is not None:
            if all(rank.acknowledged for rank in ranks):
                self._close_cycle()
            elif now - self._cycle > max(CEILING, 10 * self._timeout):
                _logger.error("an averaging cycle has not closed in %.0f s", now - self._cycle)
                self.end(wire.SaveReason.REDUCE_STALL)
                return
        elif all(rank.steps_since_average for rank in ranks):
            self._open_cycle()
        if self._reports is not None and all(rank.reported for rank in ranks):
            self._finish_epoch(self._reports)
        if self._reports is None and self._cycle is None:
            self._advance()

    def _advance(self) -> None:
        """What follows an epoch that is over, with no averaging going on."""
        recipe = self._recipe
        if self._epoch + 1 < recipe.epochs:
            self._start_epoch(self._epoch + 1)
        elif len(self._ranks) > 1 and any(rank.steps_since_average for rank in self._ranks.values()):
            self._open_cycle()
        elif recipe.evaluate_every and not self._evaluated:
            self._evaluated = True
            self._evaluating = self._role
            self._send(self._role, wire.ExecuteEvalCallback(FINAL_EVALUATION, recipe.epochs, self._role))
        elif self._evaluating is None:
            self.end()

    # -- epochs

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._reports = epoch, []
        if not self._role_told:
            self._role_told = True
            self._broadcast(wire.SetEpochCallbackRole(self._role))
        if epoch > 0:
            self._call_back(epoch)
        for number, rank in self._ranks.items():
            plan = self._recipe.plan(epoch, number)
            rank.slices, rank.reported = [(plan.partition_offset, plan.partition_size)], False
            rank.steps_before_plan = rank.steps
            self._send(number, wire.StartEpoch(plan))

    def _call_back(self, epoch: int) -> None:
        recipe, wanted = self._recipe, self._wanted
        self._wanted = set()
        if _due(recipe.checkpoint_every, epoch) or wire.IntentKind.CHECKPOINT_NOW in wanted:
            self._tried = set()
            self._send(self._role, wire.Checkpoint(epoch, self._role))
        if _due(recipe.evaluate_every, epoch) or wire.IntentKind.EVAL_NOW in wanted:
            self._send(self._role, wire.ExecuteEvalCallback(epoch, epoch, self._role))

    def _finish_epoch(self, reports: Sequence[wire.MetricsMsg]) -> None:
        self._reports = None
        metrics = aggregate_metrics(self._epoch, self._recipe.world, reports, revision=self._recipe.revision)
        self._broadcast(wire.EpochAggregated(metrics))
        with self._news:
            self._epochs.append(metrics)
            self._news.notify_all()

    # -- averaging cycles

    def _open_cycle(self) -> None:
        self._cycle = time.monotonic()
        for rank in self._ranks.values():
            rank.acknowledged = False
            rank.averaged = 0
        self._broadcast(wire.RequestParams())
        self._broadcast(wire.Throttle())

    def _close_cycle(self) -> None:
        self._cycle = None
        result = self._result
        result.averages += 1
        for rank in self._ranks.values():
            result.global_step += rank.averaged
            rank.steps_since_average -= rank.averaged
        self._broadcast(wire.Update(result.averages))
        self._broadcast(wire.SetGlobalStep(result.global_step))

    # -- messages

    def _handle(self, message: wire.Message) -> None:
        if not isinstance(message, _OF_RANKS):
            _logger.warning("dropped a %s, which no rank sends", type(message).__name__)
            return
        rank = self._ranks.get(message.rank)
        if rank is None:
            return  # dead, done, or beyond the world
        if isinstance(message, wire.MetricsMsg):
            self._report(rank, message)
        else:
            rank.heard = time.monotonic()
            self._time(rank, message)

    def _report(self, rank: _Rank, message: wire.MetricsMsg) -> None:
        if self._reports is not None and message.epoch == self._epoch:
            self._reports.append(message)
            rank.reported = True

    def _time(self, rank: _Rank, message: wire.TimingMsg) -> None:
        match message:
            case wire.Batch():
                rank.steps = max(rank.steps, message.step_count)
                rank.steps_since_average += 1
            case wire.SyncAck() if message.divergence is not None and not rank.acknowledged:
                rank.acknowledged = True
                rank.averaged = rank.steps_since_average  # What comes before the Update waits for the next average.
            case wire.Intent():
                self._wanted.add(message.kind)
            case wire.EvalResult():
                self._result.evaluations.append(message)
                if message.rank == self._evaluating:
                    self._evaluating = None
                if message.error is None:
                    self._broadcast(wire.EvalBroadcast(message.epoch, message.metric))
            case wire.CheckpointResult():
                self._result.checkpoints.append(message)
                self._retry_checkpoint(message)
            case wire.Exiting():
                self._leave(message.rank, self._ranks.pop(message.rank))

    def _retry_checkpoint(self, message: wire.CheckpointResult) -> None:
        if message.error is None:
            return
        self._tried.add(message.rank)
        others = sorted(set(self._ranks) - self._tried)
        if others and not self._ending:
            self._send(others[0], wire.Checkpoint(message.version, others[0]))

    # -- ranks that leave

    def _leave(self, rank: int, left: _Rank | None) -> None:
        """Go on without a rank that is not among ``_ranks`` any more."""
        self._left.add(rank)
        self._reducer.drop(rank)
        if self._ending:
            return
        if not self._ranks:
            raise ChannelError(f"all ranks are lost: {self._result.dead or 'they left before the end'}")
        if self._evaluating == rank:
            self._evaluating = None
        if self._role == rank:
            self._role, self._role_told = min(self._ranks), False
        if left is not None and not left.reported:
            self._redistribute(left)

    def _redistribute(self, left: _Rank) -> None:
        """What a rank had left of its plan goes to those that are still at theirs."""
        trained = (left.steps - left.steps_before_plan) * self._recipe.batch
        heirs = sorted(number for number, rank in self._ranks.items() if not rank.reported)
        for offset, size in left.slices:
            done = min(trained, size)
            trained -= done
            for i, number in enumerate(heirs):
                first, count = _share(size - done, len(heirs), i)
                if count:
                    self._ranks[number].slices.append((offset + done + first, count))
                    self._send(number, wire.ExtendPartition(offset + done + first, count))

    def _check_silence(self, now: float) -> None:
        for number, rank in list(self._ranks.items()):
            if now - rank.heard > self._timeout:
                self.lost(number, f"no sign of life for {self._timeout} s")

    # -- sending

    def _broadcast(self, message: wire.Message) -> None:
        for number in self._ranks:
            self._send(number, message)

    def _send(self, number: int, message: wire.Message) -> None:
        try:
            self._ranks[number].channel.send(message, number)
        except ChannelError as error:
            self.post(self.lost, number, str(error))


def _due(every: int, epoch: int) -> bool:
    return every > 0 and epoch % every == 0


def aggregate_metrics(
    epoch: int,
    world: int,
    reports: Sequence[wire.MetricsMsg],
    *,
    revision: protocol.Revision = protocol.Revision.V0_6,
) -> wire.EpochMetrics:
    """The cohort's metrics of an epoch, as the crate makes them of its ranks' reports, any number from each.

    Losses and scalars are weighted by batches; times, in milliseconds, are maxima. Each rank's loss and samples are
    there from 0.7 on, no loss where a rank has had no batch.

    Args:
        epoch: the epoch's number.
        world: the number of ranks.
        reports: the reports of all ranks.
        revision: the one that is to carry them.
    """
    batches = [0] * world
    samples = [0] * world
    losses = [0.0] * world
    times = {name: [0.0] * world for name in ("epoch_ms", "share_complete_ms", "compute_only_ms", "data_starve_ms")}
    sums: list[dict[str, tuple[float, int]]] = [{} for _ in range(world)]
    for report in reports:
        rank = report.rank
        batches[rank] += report.batches_processed
        samples[rank] += report.samples_processed
        losses[rank] += report.avg_loss * report.batches_processed
        for name, longest in times.items():
            longest[rank] = max(longest[rank], getattr(report, name))
        for name, (total, values) in report.scalars.items():
            had, counted = sums[rank].get(name, (0.0, 0))
            sums[rank][name] = had + total, counted + values
    means = [{name: total / n if n else 0.0 for name, (total, n) in scalars.items()} for scalars in sums]
    scalars: dict[str, float] = {}
    for name in {name: None for mean in means for name in mean}:
        ranks = [rank for rank in range(world) if sums[rank].get(name, (0.0, 0))[1]]
        weight = sum(batches[rank] for rank in ranks)
        scalars[name] = sum(means[rank][name] * batches[rank] for rank in ranks) / weight if weight else 0.0
    each: dict[str, Any] = {}
    if revision >= protocol.Revision.V0_7:
        each["per_rank_loss"] = [loss / n if n else None for loss, n in zip(losses, batches, strict=True)]
        each["per_rank_samples"] = samples
    spent = [share or whole for share, whole in zip(times["share_complete_ms"], times["epoch_ms"], strict=True)]
    return wire.EpochMetrics(
        epoch=epoch,
        scalars=scalars,
        per_rank=means,
        avg_loss=sum(losses) / sum(batches) if any(batches) else 0.0,
        epoch_ms=max(times["epoch_ms"]),
        per_rank_throughput=[n / ms if ms > 0 else 0.0 for n, ms in zip(samples, spent, strict=True)],
        per_rank_batch_share=[n / sum(batches) if any(batches) else 1 / world for n in batches],
        per_rank_share_complete_ms=times["share_complete_ms"],
        per_rank_compute_only_ms=times["compute_only_ms"],
        per_rank_data_starve_ms=times["data_starve_ms"],
        device_indices=bytes(world),
        **each,
    )

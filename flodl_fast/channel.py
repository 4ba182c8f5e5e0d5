"""Blocking channels of a flodl cluster over sockets (docs/wire.md §7, §8); ``aio`` has the same for asyncio.

A rank holds one ControlChannel and one DataChannel. Each is dialled in one of two ways: to the relay of the rank's
host on its loopback ports, or straight to the controller's port, as a host of one rank that is its own relay. The
serving side, ``accept``, gives the same classes.

Errors: TimeoutError where a ``timeout`` of the caller's passed, with nothing lost; ChannelClosed where either side has
closed; any other ChannelError, or the DecodeError of what came, where the stream cannot go on: the channel is closed
then, and later calls raise ChannelClosed that names the reason.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from . import net
from .errors import ChannelClosed, FlodlError
from .frames import Codec
from .messages import Message, RelayDeclareDead, RelayMsg
from .net import Deadlines, Line, Messages, Rounds, Send, Steps
from .protocol import MAGIC_CHANNEL_CONTROL, RoundKind
from .rounds import RoundFrame
from .signature import told_signatures

__all__ = ["ControlChannel", "DataChannel", "JoinChannel", "accept"]

Address = tuple[str, int]

T = TypeVar("T")
Self = TypeVar("Self", bound="_Channel")

_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
_LONGEST = 2_000_000.0  # seconds, 23 days: the system takes no longer wait


class _Link(net.Link):
    """A non-blocking socket whose two directions wait on their own; each is used under its lock and ``guard``."""

    def __init__(self, sock: socket.socket, deadlines: Deadlines) -> None:
        super().__init__(deadlines)
        self.writing = threading.Lock()
        self.reading = threading.Lock()
        with suppress(OSError):  # Not every socket is TCP's.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sock = sock

    @classmethod
    def dial(cls, address: Address | socket.socket, deadlines: Deadlines) -> _Link:
        if isinstance(address, socket.socket):
            return cls(address, deadlines)
        net.check_address(address)
        left = deadlines.attempts
        while True:
            left -= 1
            try:
                return cls(socket.create_connection(address, deadlines.handshake), deadlines)
            except OSError as error:
                if left <= 0:
                    raise net.no_answer(address, deadlines, error) from error
            time.sleep(deadlines.pause)

    def receive(self, view: memoryview, wait: float | None) -> int | None:
        """The number of bytes that came into the view, 0 at the end of the stream, None if none came in time."""
        while True:
            try:
                return self._sock.recv_into(view)
            except BlockingIOError:
                if not self._ready(selectors.EVENT_READ, wait):
                    return None
            except OSError as error:
                if error.errno is None:  # The system's have one; this is what a signal handler raises.
                    raise
                return 0

    def write(self, data: Any) -> None:
        """Send all of these bytes."""
        sent = 0
        with memoryview(data) as view:
            while sent < len(view):
                try:
                    sent += self._sock.send(view[sent:])
                except BlockingIOError:
                    if not self._ready(selectors.EVENT_WRITE, self.deadlines.write_stall):
                        raise net.stalled(self.deadlines) from None
                except OSError as error:
                    if error.errno is None:
                        raise
                    raise ChannelClosed(f"the peer has closed the channel ({error})") from error

    def _ready(self, event: int, wait: float | None) -> bool:
        with _Selector() as selector:
            selector.register(self._sock, event)
            return bool(selector.select(None if wait is None else min(wait, _LONGEST)))

    def run(self, steps: Steps[T]) -> T:
        """Carry out a conversation; what it returns."""
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                value: T = end.value
                return value
            if isinstance(step, Send):
                self.write(step.data)
                continue
            got = 0
            while got < len(step.view):
                n = self.receive(step.view[got:], step.wait)
                if n is None:
                    raise step.late(got)
                if n == 0:
                    raise step.ended(got)
                got += n

    def _end(self) -> None:
        with suppress(OSError):  # The peer may be gone already.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut(ChannelClosed("this side has closed it"))
        with self.writing, self.reading:  # Nobody uses the descriptor any more, which may soon be another file's.
            self._sock.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def peer(self) -> Any:
        try:
            return self._sock.getpeername()
        except OSError:
            return None


def _shake_hands(link: _Link, steps: Steps[T]) -> T:
    """Carry out a handshake; where it fails the socket is closed."""
    try:
        net.warn_of_public(link.peer())
        return link.run(steps)
    except BaseException as error:
        link.close()
        if isinstance(error, FlodlError):
            raise net.handshake_failed(error) from error
        raise


class _Channel(net.Channel):
    _link: _Link

    def close(self) -> None:
        """Close at once; calls that wait in other threads raise ChannelClosed. Closing again does nothing.

        A rank keeps its data channel open until Shutdown: closing it earlier ends the round service for the whole
        world (docs/wire.md §8).
        """
        self._link.close()
        self._free()

    def _free(self) -> None:
        """Let go of the memory that frames were kept in."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _MessageChannel(_Channel):
    """What the two message channels share: any number of threads may send, one at a time receives."""

    def __init__(self, link: _Link, codec: Codec, line: Line | None) -> None:
        super().__init__(link, codec, line)
        self._messages = Messages(codec, line)
        self._buffer = memoryview(bytearray(net.READ_SIZE))

    def _free(self) -> None:
        self._buffer = memoryview(b"")

    def send(self, message: Message, rank: int | None = None) -> None:
        """Send a message; returns when all of its frame is with the operating system.

        Args:
            message: any Message.
            rank: on a served channel of several ranks, the rank it is for.

        Raises:
            EncodeError, TypeError: as ``Codec.encode``; the channel goes on.
            ChannelClosed: the channel is closed.
            ChannelError: the peer has taken no byte for ``deadlines.write_stall``; the channel is closed.
            ValueError: no rank given where the channel has several, or one that is not among them.
        """
        frame = self._messages.pack(message, rank)
        with self._link.writing, self._link.guard():
            self._link.write(frame)

    def recv(self, timeout: float | None = None, *, liveness: float | None = None) -> Message | RelayMsg:
        """The next message; on a served channel also a relay's own, a RelayRankExit.

        Args:
            timeout: seconds to wait, None for no limit, 0 to take only what is there.
            liveness: the longest silence in seconds, counted across calls from the last message (or the handshake) to
                when nothing is left to read; None for no limit. A rank gives ``deadlines.liveness``.

        Raises:
            TimeoutError: no whole message in ``timeout``; what came of it is kept for the next call.
            ChannelClosed: the channel is closed, or the peer ended it between frames.
            ChannelError: the end came inside a frame (its cause is a TruncatedError), a frame stands still for
                ``deadlines.starvation``, or ``liveness`` has passed; the channel is closed.
            DecodeError: the bytes are no such frame; the channel is closed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._link.reading, self._link.guard():
            while (message := self._messages.next()) is None:
                wait, late = self._messages.patience(until, liveness, self.deadlines.starvation)
                n = self._link.receive(self._buffer, wait)
                if n is None:
                    raise late
                if n == 0:
                    raise self._messages.ended()
                self._messages.feed(self._buffer[:n])
            return message


class ControlChannel(_MessageChannel):
    """Messages between one rank and the coordinator, in both directions, whole frames only.

    Any number of threads may send, one at a time receives.
    """

    @classmethod
    def connect(
        cls,
        address: Address | socket.socket,
        codec: Codec,
        rank: int,
        world: int,
        *,
        host: str | None = None,
        model_sig: bytes | None = None,
        deadlines: Deadlines | None = None,
    ) -> ControlChannel:
        """Dial and shake hands.

        Args:
            address: (host, port), dialled until it answers or the attempts are spent; or a connected socket, which
                the channel owns from the handshake on, its failure included.
            codec: the Codec of the cluster.
            rank: the rank to be.
            world: the number of ranks of the cluster.
            host: None to speak to a relay's loopback control port; a host name of its own to speak to the controller's
                port directly, as the host of this rank alone.
            model_sig: the 32 bytes of ``flodl_fast.model_sig`` for this rank's model: needed at 0.8, not there before.
            deadlines: other waits than ``Deadlines()``.

        Raises:
            HandshakeError: nobody answers, or not in time, or not as a flodl peer of this cluster.
            ValueError: no such rank in the world.
            EncodeError: a ``model_sig`` that the revision does not have, or has and is not given.
        """
        line = Line.of_rank(rank, world, host, told_signatures(codec.revision, model_sig))
        link = _Link.dial(address, deadlines or Deadlines())
        _shake_hands(link, net.dial_control(codec, line, link.deadlines.handshake))
        return cls(link, codec, line)


class JoinChannel(_MessageChannel):
    """Messages between a join agent and the membership window: bare control frames (docs/wire.md §4, Join)."""

    @classmethod
    def connect(
        cls, address: Address | socket.socket, codec: Codec, *, deadlines: Deadlines | None = None
    ) -> JoinChannel:
        """Dial the join window, which then waits for a JoinHello.

        Args:
            address: as for ``ControlChannel.connect``.
            codec: the Codec of the cluster, or one of 16 zero bytes under open admission.
            deadlines: other waits than ``Deadlines()``.

        Raises:
            HandshakeError: nobody answers.
        """
        link = _Link.dial(address, deadlines or Deadlines())
        _shake_hands(link, net.dial_join())
        return cls(link, codec, None)

    def rekey(self, codec: Codec) -> None:
        """Use another Codec from the next frame on, in both directions: open admission delivers the salt on the way.

        Args:
            codec: the Codec with that salt.
        """
        with self._link.writing, self._link.reading:
            self.codec = codec
            self._messages.rekey(codec)


class DataChannel(_Channel):
    """Rounds of one rank: a frame up, the reduced frame back, strictly in turn.

    One round at a time: a second thread waits for the first. The memory of one frame is kept between rounds, and the
    layouts of their tensors.
    """

    def __init__(self, link: _Link, codec: Codec, line: Line) -> None:
        super().__init__(link, codec, line)
        self._rounds = Rounds(codec, line)

    def _free(self) -> None:
        self._rounds.free()

    @classmethod
    def connect(
        cls,
        address: Address | socket.socket,
        codec: Codec,
        rank: int,
        world: int,
        *,
        host: str | None = None,
        deadlines: Deadlines | None = None,
    ) -> DataChannel:
        """Dial and shake hands.

        Args:
            address: as for ``ControlChannel.connect``, but the data port of a relay.
            codec: the Codec of the cluster.
            rank: the rank to be.
            world: the number of ranks of the cluster.
            host: as for ``ControlChannel.connect``.
            deadlines: other waits than ``Deadlines()``.

        Raises:
            HandshakeError, ValueError: as ``ControlChannel.connect``.
        """
        line = Line.of_rank(rank, world, host)
        link = _Link.dial(address, deadlines or Deadlines())
        _shake_hands(link, net.dial_data(codec, line, link.deadlines.handshake))
        return cls(link, codec, line)

    def all_reduce(
        self,
        arrays: Iterable[Any],
        kind: RoundKind,
        weight: float,
        out: Iterable[Any] | None = None,
        *,
        scale: float | None = None,
        view: bool = False,
        wire: str | None = None,
    ) -> RoundFrame:
        """One round: send these tensors, wait for all ranks, take the reduced ones (docs/wire.md §6).

        Args:
            arrays: float32 arrays by buffer protocol or DLPack, of the same shapes at all ranks; from 0.7 on also
                bfloat16 ones, at all ranks.
            kind: MODEL is divided by the summed weight, CONTROL summed only.
            weight: this rank's mass, finite and not negative; what goes into a MODEL round is multiplied by it, before
                or by ``scale``.
            out: writable arrays of the same shapes for the result, which may be ``arrays``; new ones of their dtypes if
                None. Float32 ones take bfloat16 widened. On any error they are as they were, and also where the reply
                is not ``realized``.
            scale: what each value is multiplied by on its way into the frame, rounded to float32 first; None for
                nothing. By 0 a rank of 0.8 sends no data, as the crate's does.
            view: give the result as read-only arrays on the channel's own memory, which the next round overwrites;
                in the dtype in which it travels, and not with ``out``.
            wire: "bf16" has all tensors travel as bfloat16, rounded to nearest with ties to even (0.7 on; at all ranks
                of a cluster, and by the crate's in MODEL rounds only). By default each does in its own dtype.

        Returns:
            The reduced frame: its tensors are those of ``out``, its weight the summed weight. Where ``realized`` is
            False the rank keeps its local state; the tensors of a result in new arrays mean nothing then.

        Raises:
            EncodeError, TensorError, TypeError, ValueError: arrays, weight or ``out`` that cannot be; nothing was sent.
            TensorError: the reply differs in kind, count or shape: the message names the tensor and both shapes. The
                channel goes on.
            ChannelClosed: the channel is closed, or the controller ended it.
            ChannelError: no byte of the reply for ``deadlines.reply``, no byte taken for ``deadlines.write_stall``,
                an end inside the reply, or this rank was declared dead; the channel is closed.
            DecodeError: the reply is no authentic frame; the channel is closed.
        """
        if view and out is not None:
            raise ValueError("view=True and out= contradict each other")
        out = None if out is None else list(out)
        with self._link.writing, self._link.reading:
            request = self._rounds.ask(arrays, kind, weight, out, scale, wire)
            with self._link.guard():
                self._link.run(self._rounds.exchange(request, self.deadlines.reply))
                return self._rounds.adopt(out, view)

    def broadcast(
        self, arrays: Iterable[Any], root: int = 0, out: Iterable[Any] | None = None, *, view: bool = False
    ) -> RoundFrame:
        """One round in which all ranks take the root's values: it sends ``arrays``, the others zeros of their shapes.

        Every rank, the root too, should adopt the result: -0.0 comes back as +0.0.

        Args:
            arrays: as for ``all_reduce``; at ranks other than the root only their shapes count.
            root: the rank whose values are meant.
            out: as for ``all_reduce``; ``arrays`` to adopt in place.
            view: as for ``all_reduce``.

        Raises:
            EncodeError, TensorError, TypeError, ValueError, ChannelError, DecodeError: as ``all_reduce``.
        """
        return self.all_reduce(self._rounds.broadcast(arrays, root), RoundKind.CONTROL, 0.0, out, view=view)

    def gather(self, value: float) -> np.ndarray:
        """One round in which each rank gives a number.

        Args:
            value: this rank's number.

        Returns:
            A float32 array of shape (world,): each rank's value, rounded to float32, in its slot.

        Raises:
            EncodeError, TensorError, TypeError, ValueError, ChannelError, DecodeError: as ``all_reduce``.
        """
        slots: np.ndarray = self.all_reduce([self._rounds.gather(value)], RoundKind.CONTROL, 0.0).tensors[0]
        return slots

    # -- the serving side

    def send(self, frame: RoundFrame) -> None:
        """On a served channel: send a reduced frame to all ranks of the host.

        Args:
            frame: the frame.

        Raises:
            EncodeError, TensorError, TypeError, ValueError, ChannelError, DecodeError: as ``all_reduce``.
        """
        with self._link.writing:
            request = self._rounds.pack(frame.tensors, frame.kind, frame.weight)
            with self._link.guard():
                self._link.write(request)

    def recv(self, timeout: float | None = None) -> RoundFrame | RelayMsg:
        """On a served channel: the host's next frame, in new arrays; or its relay's own message, a RelayRankExit.

        Tensors that came without data (0.8) are Elided.

        Args:
            timeout: seconds to wait for a frame to begin, None for no limit.

        Raises:
            TimeoutError: no frame has begun in ``timeout``.
            TensorError: a frame whose tensors cannot be; the channel goes on.
            ChannelError, other DecodeErrors: as ``ControlChannel.recv``.
        """
        with self._link.reading, self._link.guard():
            message = self._link.run(self._rounds.receive(timeout, self.deadlines.starvation, poll=True))
            return self._rounds.take() if message is None else message

    def declare_dead(self, rank: int) -> None:
        """On a served channel: tell the host to go on without a rank. One that came as to a relay is not told.

        Args:
            rank: the dead rank.

        Raises:
            EncodeError, TensorError, TypeError, ValueError, ChannelError, DecodeError: as ``all_reduce``.
        """
        with self._link.writing, self._link.guard():
            self._link.write(self._rounds.tell(RelayDeclareDead(rank)))


def accept(
    sock: socket.socket, codec: Codec, world: int, *, deadlines: Deadlines | None = None
) -> ControlChannel | DataChannel | JoinChannel:
    """Serve a socket that was just accepted: by its first bytes, shake hands and give the channel that it asks for.

    Relays and direct ranks come with a channel's magic and a relay hello; a rank that takes this port for its relay's
    comes with its own hello. Which ranks are there already is the caller's to check.

    Args:
        sock: an accepted socket, which the channel owns from here on; it is closed on failure.
        codec: the Codec of the cluster; a JoinChannel can be rekeyed before its first message.
        world: the number of ranks of the cluster.
        deadlines: other waits than ``Deadlines()``.

    Raises:
        HandshakeError: the first bytes are of nothing served here, came too late, or do not fit this cluster.
    """
    link = _Link(sock, deadlines or Deadlines())
    magic, line = _shake_hands(link, net.serve(codec, world, link.deadlines))
    if line is None:
        return JoinChannel(link, codec, None)
    return (ControlChannel if magic == MAGIC_CHANNEL_CONTROL else DataChannel)(link, codec, line)

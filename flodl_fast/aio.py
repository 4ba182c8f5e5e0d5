"""The channels of ``flodl_fast.channel`` for asyncio: the same names, arguments, results and errors (docs/wire.md §7).

A channel belongs to one event loop. Any await may be cancelled: a frame or a round that has begun goes on to its end
by itself, and the next call waits for that. Frames are encoded and decoded on the loop's thread.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from . import net
from .channel import Address
from .errors import ChannelClosed, FlodlError
from .frames import Codec
from .messages import Message, RelayDeclareDead, RelayMsg
from .net import Deadlines, Line, Messages, Rounds, Send, Steps
from .protocol import MAGIC_CHANNEL_CONTROL, RoundKind
from .rounds import RoundFrame
from .signature import told_signatures

__all__ = ["ControlChannel", "DataChannel", "JoinChannel", "accept"]

T = TypeVar("T")
Self = TypeVar("Self", bound="_Channel")


class _Link(net.Link, asyncio.Protocol):
    """A socket's two directions; each is used under its lock and ``guard``."""

    def __init__(self, deadlines: Deadlines) -> None:
        super().__init__(deadlines)
        self.writing = asyncio.Lock()
        self.reading = asyncio.Lock()
        self._came = bytearray()
        self._reader: asyncio.Future[bool] | None = None
        self._writer: asyncio.Future[bool] | None = None
        self._ended = self._full = False
        self._gone = asyncio.get_running_loop().create_future()

    @classmethod
    async def over(cls, sock: socket.socket, deadlines: Deadlines) -> _Link:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: cls(deadlines), sock=sock))[1]

    @classmethod
    async def dial(cls, address: Address | socket.socket, deadlines: Deadlines) -> _Link:
        if isinstance(address, socket.socket):
            return await cls.over(address, deadlines)
        net.check_address(address)
        loop = asyncio.get_running_loop()
        left = deadlines.attempts
        while True:
            left -= 1
            try:
                dial = loop.create_connection(lambda: cls(deadlines), *address)
                return (await asyncio.wait_for(dial, deadlines.handshake))[1]
            except (OSError, asyncio.TimeoutError) as error:
                if left <= 0:
                    raise net.no_answer(address, deadlines, error) from error
            await asyncio.sleep(deadlines.pause)

    # -- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        transport.set_write_buffer_limits(0)  # type: ignore[attr-defined]
        with suppress(OSError):  # Not every socket is TCP's.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._came += data
        if len(self._came) >= net.READ_SIZE:
            self._transport.pause_reading()
        _wake(self._reader)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        _wake(self._writer)

    def eof_received(self) -> bool:
        self._ended = True
        _wake(self._reader)
        return True  # The other direction may go on.

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        _wake(self._reader)
        _wake(self._writer)
        _wake(self._gone)

    # -- steps

    async def receive(self, view: memoryview, wait: float | None) -> int | None:
        """The number of bytes that came into the view, 0 at the end of the stream, None if none came in time."""
        if not self._came and not self._ended:
            self._reader = _waiter(wait)
            if not await self._reader:
                return None
        n = min(len(view), len(self._came))
        with memoryview(self._came) as came:
            view[:n] = came[:n]
        del self._came[:n]
        if len(self._came) < net.READ_SIZE and not self._ended:
            self._transport.resume_reading()
        return n

    async def write(self, data: Any) -> None:
        """Send all of these bytes, which a cancellation finds sent whole or not at all."""
        await self._drain()
        self._transport.write(data)
        await self._drain()

    async def _drain(self) -> None:
        """Wait until the operating system has all that was written."""
        left = self._transport.get_write_buffer_size()
        while self._full and not self._transport.is_closing():
            self._writer = _waiter(self.deadlines.write_stall)
            if not await self._writer:
                before, left = left, self._transport.get_write_buffer_size()
                if left >= before:
                    raise net.stalled(self.deadlines)
        if self._transport.is_closing():
            raise ChannelClosed("the peer has closed the channel")

    async def run(self, steps: Steps[T]) -> T:
        """Carry out a conversation; what it returns."""
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                value: T = end.value
                return value
            if isinstance(step, Send):
                for at in range(0, len(step.data), net.READ_SIZE):
                    await self.write(bytes(step.data[at : at + net.READ_SIZE]))
                continue
            got = 0
            while got < len(step.view):
                n = await self.receive(step.view[got:], step.wait)
                if n is None:
                    raise step.late(got)
                if n == 0:
                    raise step.ended(got)
                got += n

    def begin(self, steps: Steps[T]) -> asyncio.Task[T]:
        """Carry out a conversation in a task of its own, which no caller's end cuts short."""

        async def whole() -> T:
            with self.guard():
                return await self.run(steps)

        task = asyncio.ensure_future(whole())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # Its caller may be gone.
        return task

    # -- the end

    def _end(self) -> None:
        self._transport.abort()

    async def close(self) -> None:
        self.shut(ChannelClosed("this side has closed it"))
        await asyncio.shield(self._gone)

    def fileno(self) -> int:
        return -1 if self._gone.done() else self._transport.get_extra_info("socket").fileno()

    def peer(self) -> Any:
        return self._transport.get_extra_info("peername")


def _waiter(wait: float | None) -> asyncio.Future[bool]:
    """A future that is True once woken, False once the wait has passed."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    if wait is not None:
        timer = loop.call_later(wait, _wake, waiter, False)
        waiter.add_done_callback(lambda _: timer.cancel())
    return waiter


def _wake(waiter: asyncio.Future[bool] | None, value: bool = True) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(value)


async def _shake_hands(link: _Link, steps: Steps[T]) -> T:
    """Carry out a handshake; where it fails the socket is closed."""
    try:
        net.warn_of_public(link.peer())
        return await link.run(steps)
    except BaseException as error:
        await link.close()
        if isinstance(error, FlodlError):
            raise net.handshake_failed(error) from error
        raise


class _Channel(net.Channel):
    _link: _Link

    async def close(self) -> None:
        """Close at once; calls that wait in other tasks raise ChannelClosed. Closing again does nothing."""
        await self._link.close()
        self._free()

    def _free(self) -> None:
        """Let go of the memory that frames were kept in."""

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _MessageChannel(_Channel):
    """What the two message channels share: any number of tasks may send, one at a time receives."""

    def __init__(self, link: _Link, codec: Codec, line: Line | None) -> None:
        super().__init__(link, codec, line)
        self._messages = Messages(codec, line)
        self._buffer = memoryview(bytearray(net.READ_SIZE))

    def _free(self) -> None:
        self._buffer = memoryview(b"")

    async def send(self, message: Message, rank: int | None = None) -> None:
        """As ``channel.ControlChannel.send``; cancelled, the message goes out whole or not at all."""
        frame = self._messages.pack(message, rank)
        async with self._link.writing:
            with self._link.guard(asyncio.CancelledError):
                await self._link.write(frame)

    async def recv(self, timeout: float | None = None, *, liveness: float | None = None) -> Message | RelayMsg:
        """As ``channel.ControlChannel.recv``; cancelled, nothing is lost."""
        until = None if timeout is None else time.monotonic() + timeout
        async with self._link.reading:
            with self._link.guard(asyncio.CancelledError):
                while (message := self._messages.next()) is None:
                    wait, late = self._messages.patience(until, liveness, self.deadlines.starvation)
                    n = await self._link.receive(self._buffer, wait)
                    if n is None:
                        raise late
                    if n == 0:
                        raise self._messages.ended()
                    self._messages.feed(self._buffer[:n])
                return message


class ControlChannel(_MessageChannel):
    """Messages between one rank and the coordinator, in both directions, whole frames only."""

    @classmethod
    async def connect(
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
        """As ``channel.ControlChannel.connect``."""
        line = Line.of_rank(rank, world, host, told_signatures(codec.revision, model_sig))
        link = await _Link.dial(address, deadlines or Deadlines())
        await _shake_hands(link, net.dial_control(codec, line, link.deadlines.handshake))
        return cls(link, codec, line)


class JoinChannel(_MessageChannel):
    """Messages between a join agent and the membership window: bare control frames (docs/wire.md §4, Join)."""

    @classmethod
    async def connect(
        cls, address: Address | socket.socket, codec: Codec, *, deadlines: Deadlines | None = None
    ) -> JoinChannel:
        """As ``channel.JoinChannel.connect``."""
        link = await _Link.dial(address, deadlines or Deadlines())
        await _shake_hands(link, net.dial_join())
        return cls(link, codec, None)

    async def rekey(self, codec: Codec) -> None:
        """As ``channel.JoinChannel.rekey``."""
        async with self._link.writing, self._link.reading:
            self.codec = codec
            self._messages.rekey(codec)


class DataChannel(_Channel):
    """Rounds of one rank: a frame up, the reduced frame back, strictly in turn; one round at a time."""

    def __init__(self, link: _Link, codec: Codec, line: Line) -> None:
        super().__init__(link, codec, line)
        self._rounds = Rounds(codec, line)
        self._sending: asyncio.Task[None] | None = None
        self._coming: asyncio.Task[RelayMsg | None] | None = None

    def _free(self) -> None:
        self._rounds.free()

    @classmethod
    async def connect(
        cls,
        address: Address | socket.socket,
        codec: Codec,
        rank: int,
        world: int,
        *,
        host: str | None = None,
        deadlines: Deadlines | None = None,
    ) -> DataChannel:
        """As ``channel.DataChannel.connect``."""
        line = Line.of_rank(rank, world, host)
        link = await _Link.dial(address, deadlines or Deadlines())
        await _shake_hands(link, net.dial_data(codec, line, link.deadlines.handshake))
        return cls(link, codec, line)

    async def all_reduce(
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
        """As ``channel.DataChannel.all_reduce``; cancelled, ``out`` stays as it was, though the frame may count."""
        if view and out is not None:
            raise ValueError("view=True and out= contradict each other")
        out = None if out is None else list(out)
        async with self._link.writing, self._link.reading:
            await self._sent()
            request = self._rounds.ask(arrays, kind, weight, out, scale, wire)
            with self._link.guard(asyncio.CancelledError):
                self._sending = self._link.begin(self._rounds.exchange(request, self.deadlines.reply))
                await asyncio.shield(self._sending)
                return self._rounds.adopt(out, view)

    async def broadcast(
        self, arrays: Iterable[Any], root: int = 0, out: Iterable[Any] | None = None, *, view: bool = False
    ) -> RoundFrame:
        """As ``channel.DataChannel.broadcast``."""
        return await self.all_reduce(self._rounds.broadcast(arrays, root), RoundKind.CONTROL, 0.0, out, view=view)

    async def gather(self, value: float) -> np.ndarray:
        """As ``channel.DataChannel.gather``."""
        reply = await self.all_reduce([self._rounds.gather(value)], RoundKind.CONTROL, 0.0)
        slots: np.ndarray = reply.tensors[0]
        return slots

    # -- the serving side

    async def send(self, frame: RoundFrame) -> None:
        """As ``channel.DataChannel.send``; cancelled, the frame goes out whole or not at all."""
        async with self._link.writing:
            await self._sent()
            request = self._rounds.pack(frame.tensors, frame.kind, frame.weight)
            with self._link.guard(asyncio.CancelledError):
                self._sending = self._link.begin(net.send(request))
                await asyncio.shield(self._sending)

    async def recv(self, timeout: float | None = None) -> RoundFrame | RelayMsg:
        """As ``channel.DataChannel.recv``; cancelled, nothing is lost."""
        async with self._link.reading:
            with self._link.guard(asyncio.CancelledError):
                if self._coming is None:
                    self._coming = self._link.begin(self._rounds.receive(None, self.deadlines.starvation))
                if not (await asyncio.wait({self._coming}, timeout=timeout))[0]:
                    if not self._rounds.begun:
                        raise net.Elapsed("no frame came in time")
                    await asyncio.wait({self._coming})
                came, self._coming = self._coming, None
                message = came.result()
                return self._rounds.take() if message is None else message

    async def declare_dead(self, rank: int) -> None:
        """As ``channel.DataChannel.declare_dead``."""
        async with self._link.writing:
            await self._sent()
            with self._link.guard(asyncio.CancelledError):
                await self._link.write(self._rounds.tell(RelayDeclareDead(rank)))

    async def _sent(self) -> None:
        """Wait until what a cancelled call has begun is over."""
        if self._sending is not None and not self._sending.done():
            await asyncio.wait({self._sending})


async def accept(
    sock: socket.socket, codec: Codec, world: int, *, deadlines: Deadlines | None = None
) -> ControlChannel | DataChannel | JoinChannel:
    """As ``channel.accept``."""
    link = await _Link.over(sock, deadlines or Deadlines())
    magic, line = await _shake_hands(link, net.serve(codec, world, link.deadlines))
    if line is None:
        return JoinChannel(link, codec, None)
    return (ControlChannel if magic == MAGIC_CHANNEL_CONTROL else DataChannel)(link, codec, line)

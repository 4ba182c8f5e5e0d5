"""What the channels' tests share: a far end by the oracle's bytes, and asyncio's channels called from threads."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import reference as ref
from conftest import SALT

import flodl_fast as ff
from flodl_fast import aio, channel, net

CODEC = ff.Codec(SALT)
SIGNATURES = {rank: bytes([rank]) * 32 for rank in range(3)}  # of models, where a revision tells them
WAIT = 120.0  # seconds after which a test that waits has failed; a busy machine takes its time
WAYS = ("relay", "direct")
RANK, WORLD, HOST = 1, 3, "north"
CHANNEL_MAGIC = {"data": 0xF10D17E1, "control": 0xF10D17E2, "join": 0xF10D17E3}


def running(call: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
    """A call in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **keywords))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Blocking:
    """An object of ``flodl_fast.aio`` whose coroutines a loop in another thread runs while the caller waits."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return Blocking(value, self._loop) if callable(value) else value

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        result = self._target(*args, **keywords)
        if inspect.iscoroutine(result):
            result = asyncio.run_coroutine_threadsafe(result, self._loop).result(WAIT)
        return Blocking(result, self._loop) if isinstance(result, net.Channel) else result


class Flavour:
    """``flodl_fast.channel``, or ``flodl_fast.aio`` so that it looks the same."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: list[Any] = []
        if name == "asyncio":
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever)
            self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(channel, name) if self._loop is None else Blocking(getattr(aio, name), self._loop)

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Two connected sockets: one for a channel, one for the test, closed at the end."""
        near, far = socket.socketpair()
        far.settimeout(WAIT)
        self._open.append(far)
        return near, far

    def keep(self, channel: Any) -> Any:
        """A channel that is closed at the end."""
        self._open.append(channel)
        return channel

    def connect(self, what: str, way: str, revision: str = "0.6", **deadlines: Any) -> tuple[Any, socket.socket]:
        """A channel of rank 1 in a world of 3, and the far end of its socket, the handshake done."""
        near, far = self.pair()
        cls = {"control": self.ControlChannel, "data": self.DataChannel}[what]
        options = {"host": HOST if way == "direct" else None, "deadlines": net.Deadlines(**deadlines)}
        if what == "control" and revision == "0.8":
            options["model_sig"] = SIGNATURES[RANK]
        made = running(cls.connect, near, ff.Codec(SALT, revision), RANK, WORLD, **options)
        hello, ack = greeting(what, way, revision=revision)
        assert exactly(far, len(hello)) == hello
        far.sendall(ack)
        return self.keep(made.result(WAIT)), far

    def serve(
        self, what: str, way: str, ranks: tuple[int, ...] = (RANK,), revision: str = "0.6", **deadlines: Any
    ) -> tuple[Any, socket.socket]:
        """A served channel, and the far end of its socket, the handshake done."""
        near, far = self.pair()
        made = running(self.accept, near, ff.Codec(SALT, revision), WORLD, deadlines=net.Deadlines(**deadlines))
        hello, ack = greeting(what, way, ranks, revision)
        far.sendall(hello)
        assert exactly(far, len(ack)) == ack
        return self.keep(made.result(WAIT)), far

    def close(self) -> None:
        for end in self._open:
            end.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def greeting(
    what: str, way: str, ranks: tuple[int, ...] = (RANK,), revision: str = "0.6"
) -> tuple[bytes, bytes]:
    """The hello of a channel and its answer."""
    told = [SIGNATURES[rank] for rank in ranks if what == "control" and revision == "0.8"]
    if way == "direct":
        magic = CHANNEL_MAGIC[what].to_bytes(4, "little")
        hello = {"host": HOST, "ranks": list(ranks)} | ({"model_sigs": [*map(list, told)]} if revision == "0.8" else {})
        return magic + relay({"Hello": hello}, revision), relay("HelloAck", revision)
    if what == "control":
        return ref.control_hello(SALT, ranks[0], WORLD, b"".join(told), revision), ref.control_ack(SALT, revision)
    return ref.data_hello(ranks[0], WORLD, revision), ref.data_ack(revision)


def relay(message: Any, revision: str = "0.6") -> bytes:
    """A relay's or controller's own message."""
    return ref.encode_mux(SALT, {"record": "Control", "msg": message}, revision)


def message_bytes(way: str, message: Any, rank: int = RANK) -> bytes:
    """What carries a message in either direction."""
    frame = CODEC.encode(message)
    if way == "relay":
        return ref.add_prefix(frame)
    return ref.encode_mux(SALT, {"record": "Data", "rank": rank, "payload": frame.hex()})


def round_bytes(way: str, frame: ff.RoundFrame, record: str = "Broadcast") -> bytes:
    """What carries a round frame, by default one from the controller."""
    body = CODEC.encode_round(frame)
    return ref.add_prefix(body) if way == "relay" else ref.encode_mux(SALT, {"record": record, "payload": body.hex()})


@contextmanager
def nobody_listens() -> Iterator[tuple[str, int]]:
    """An address at which nobody listens, nor can begin to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()


def exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes of a socket, or all until its end."""
    data = bytearray()
    with suppress(ConnectionError):
        while len(data) < size and (chunk := sock.recv(min(size - len(data), 1 << 20))):
            data += chunk
    return bytes(data)

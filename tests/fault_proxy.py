"""A TCP proxy that misbehaves the way networks do: late, slow, in pieces, stopped, cut, half closed.

Bytes are never reordered, doubled or changed, for TCP does not do so.

    with Network() as network:
        address = network.proxy(("127.0.0.1", 7000), Fault(kind="cut", at=1000, up=True))
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

PIECE = 1 << 16  # bytes taken from a socket at once
AHEAD = 64  # pieces under way in one direction
LINGER_RESET = struct.pack("ii", 1, 0)  # a socket closed with this option set resets its connection

LETHAL = ("cut", "half_close", "stall", "freeze")


@dataclass(frozen=True)
class Fault:
    """What happens to the connections through a proxy.

    Attributes:
        delay: seconds that each byte is under way.
        jitter: seconds that a piece may be later than that.
        rate: bytes a second in each direction, None for as fast as it goes.
        piece: the most bytes that are passed on at once.
        kind: None; "cut": reset both ways; "half_close": one direction ends, as by FIN, and nobody reads what comes;
            "stall": one direction stands still for good; "pause": it does so for ``pause`` seconds, "freeze": for
            so many that others may take the peer for dead.
        at: bytes of that direction after which it happens.
        up: the direction that counts: towards the controller.
        pause: seconds.
        seed: of the jitter.
    """

    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None
    piece: int = PIECE
    kind: str | None = None
    at: int = 0
    up: bool = True
    pause: float = 0.0
    seed: int = 0

    @property
    def lethal(self) -> bool:
        return self.kind in LETHAL

    @classmethod
    def drawn(cls, rng: random.Random, kind: str | None, span: int) -> Fault:
        """A fault of that kind at a byte up to ``span``, early ones as likely as late ones."""
        at = rng.choice([rng.randrange(64), int(span ** rng.random()), rng.randrange(span)])
        fault = cls(kind=kind, at=at, up=rng.random() < 0.5, seed=rng.randrange(1 << 30))
        if kind == "pause":
            fault = replace(fault, pause=rng.uniform(0.1, 0.6))
        if kind == "freeze":
            fault = replace(fault, pause=rng.uniform(4, 9))
        if rng.random() < 0.5:
            fault = replace(fault, delay=rng.uniform(0, 0.02), jitter=rng.uniform(0, 0.02))
        if rng.random() < 0.3:
            fault = replace(fault, rate=10 ** rng.uniform(5, 7))
        if rng.random() < 0.5:
            fault = replace(fault, piece=rng.choice([1, 7, 100, 1448]))
        return fault


class Network:
    """The loop that runs proxies, in a thread of its own.

    Args:
        enter: called in that thread first.

    Attributes:
        injected: how many faults of each kind have come to pass.
        bytes: how many were passed on.
    """

    def __init__(self, enter: Callable[[], object] = lambda: None) -> None:
        self.injected: dict[str, int] = {}
        self.bytes = 0
        self._loop = asyncio.new_event_loop()
        self._enter = enter
        self._thread = threading.Thread(target=self._run, name="faulty network", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def proxy(self, to: tuple[str, int], fault: Fault, host: str = "127.0.0.1") -> tuple[str, int]:
        """The address of a new proxy to that address, at a free port of the host."""
        return asyncio.run_coroutine_threadsafe(self._listen(to, fault, host), self._loop).result(10)

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._enter()
        self._loop.run_forever()

    # -- in the loop

    async def _listen(self, to: tuple[str, int], fault: Fault, host: str) -> tuple[str, int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with suppress(OSError, asyncio.CancelledError):
                await self._serve(reader, writer, to, fault)
            writer.transport.abort()

        server = await asyncio.start_server(serve, host, 0)
        self._servers.append(server)
        return server.sockets[0].getsockname()[:2]

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.sleep(0)  # for the transports' own ends

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: tuple[str, int], fault: Fault
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(*to)
        try:
            calm = replace(fault, kind=None)
            pumps = [
                asyncio.ensure_future(self._pump(reader, far_writer, fault if fault.up else calm)),
                asyncio.ensure_future(self._pump(far_reader, writer, calm if fault.up else fault)),
            ]
            try:
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except _Cut:
            for end in (writer, far_writer):
                sock = end.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        finally:
            far_writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, fault: Fault) -> None:
        """Pass on one direction to its end."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(AHEAD)
        taking = asyncio.ensure_future(self._take(source, under_way, fault))
        loop = asyncio.get_running_loop()
        passed, happened = 0, fault.kind is None
        try:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    sink.write_eof()
                    return
                if not happened and passed + len(data) >= fault.at:
                    happened = True
                    before, data = data[: fault.at - passed], data[fault.at - passed :]
                    await self._give(sink, before, fault)
                    await self._happen(sink, fault)
                    passed += len(before)
                await self._give(sink, data, fault)
                passed += len(data)
        finally:
            taking.cancel()

    async def _take(
        self, source: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]], fault: Fault
    ) -> None:
        rng, loop, due = random.Random(fault.seed), asyncio.get_running_loop(), 0.0
        data = b"-"
        while data:
            try:
                data = await source.read(PIECE)
            except ConnectionError:
                data = b""
            due = max(due, loop.time() + fault.delay + fault.jitter * rng.random())  # In order, whatever the jitter.
            await under_way.put((due, data))

    async def _give(self, sink: asyncio.StreamWriter, data: bytes, fault: Fault) -> None:
        size = max(fault.piece, len(data) // 50)  # However small the pieces, a big frame gets through.
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            sink.write(piece)
            await sink.drain()
            self.bytes += len(piece)
            await asyncio.sleep(len(piece) / fault.rate if fault.rate else 0)

    async def _happen(self, sink: asyncio.StreamWriter, fault: Fault) -> None:
        assert fault.kind is not None
        self.injected[fault.kind] = self.injected.get(fault.kind, 0) + 1
        if fault.pause:
            await asyncio.sleep(fault.pause)
            return
        if fault.kind == "cut":
            raise _Cut
        if fault.kind == "half_close":
            sink.write_eof()
        await asyncio.get_running_loop().create_future()  # until the connection's end


class _Cut(Exception):
    """Both directions are over."""

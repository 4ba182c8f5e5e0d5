"""Channels and workers come and go by the thousand and leave no descriptor and no thread behind."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from channel_support import CODEC, HOST, WAYS, Flavour, greeting
from worker_support import Running, until

import flodl_fast as ff
from flodl_fast import aio, channel
from flodl_fast.worker import Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")

TIMES = 500  # of each pair of channels
WORLD = 3


@contextmanager
def nothing_left() -> Iterator[None]:
    """Descriptors and threads are no more after than before: some of another test may end meanwhile."""
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors and threading.active_count() <= threads)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


class Server:
    """One thread that accepts channel after channel."""

    def __init__(self, handle: Callable[[Any], object]) -> None:
        self._handle = handle
        self._sockets: list[socket.socket] = []
        self._news = threading.Condition()
        self._over = False
        self._running = Running(self._run)

    def give(self, sock: socket.socket) -> None:
        with self._news:
            self._sockets.append(sock)
            self._news.notify()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._sockets or self._over)
                if not self._sockets:
                    return
                sock = self._sockets.pop(0)
            self._handle(sock)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        with self._news:
            self._over = True
            self._news.notify()
        self._running.result()
        self._running.join()


@pytest.mark.parametrize("way", WAYS)
def test_channels(way):
    served = []

    def serve(sock):
        with channel.accept(sock, CODEC, WORLD) as end:
            served.append(type(end))

    with nothing_left(), Server(serve) as server:
        for i in range(TIMES):
            for cls in (channel.ControlChannel, channel.DataChannel):
                near, far = pair()
                server.give(far)
                with cls.connect(near, CODEC, i % WORLD, WORLD, host=HOST if way == "direct" else None) as end:
                    end.fileno()
    assert served == [channel.ControlChannel, channel.DataChannel] * TIMES


@pytest.mark.parametrize("way", WAYS)
def test_channels_of_asyncio(way):
    host = HOST if way == "direct" else None

    async def one(i: int, cls: Any) -> type:
        near, far = pair()
        end, other = await asyncio.gather(
            cls.connect(near, CODEC, i % WORLD, WORLD, host=host), aio.accept(far, CODEC, WORLD)
        )
        async with end, other:
            return type(other)

    async def all_of_them() -> list[type]:
        return [await one(i, cls) for i in range(TIMES) for cls in (aio.ControlChannel, aio.DataChannel)]

    with nothing_left():
        served = asyncio.run(all_of_them())
    assert served == [aio.ControlChannel, aio.DataChannel] * TIMES


@pytest.mark.parametrize("what", ["control", "data"])
@pytest.mark.parametrize("way", WAYS)
def test_a_channel_that_has_failed_needs_no_garbage_collector(what, way):
    """It keeps the memory of frames, as much as a model, so that it must not wait for one."""
    flavour = Flavour("blocking")
    gc.collect()
    gc.disable()
    try:
        end, far = flavour.connect(what, way)
        far.close()
        with pytest.raises(ff.ChannelError, match="the peer has closed the channel"):
            end.recv() if what == "control" else end.gather(1.0)
        with pytest.raises(ff.ChannelClosed, match="the channel is closed: the peer has closed the channel"):
            end.send(ff.Heartbeat(0, 0) if what == "control" else ff.RoundFrame([np.ones(1, np.float32)]))
        flavour.close()
        flavour._open.clear()
        gone = weakref.ref(end._link)
        del end
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", [b"", b"?" * 64], ids=["hangs up", "rubbish"])
def test_handshakes_that_fail(answer):
    with nothing_left():
        for cls in (channel.ControlChannel, channel.DataChannel):
            for way in WAYS:
                for _ in range(TIMES // 4):
                    near, far = pair()
                    far.sendall(answer)
                    far.shutdown(socket.SHUT_WR)
                    with pytest.raises(ff.HandshakeError):
                        cls.connect(near, CODEC, 1, WORLD, host=HOST if way == "direct" else None)
                    assert near.fileno() == -1
                    far.close()


def test_handshakes_of_asyncio_that_fail():
    async def all_of_them() -> None:
        for what, cls in (("control", aio.ControlChannel), ("data", aio.DataChannel)):
            hello, _ = greeting(what, "relay")
            for _ in range(TIMES // 4):
                near, far = pair()
                far.sendall(b"?" * 64)
                with pytest.raises(ff.HandshakeError):
                    await cls.connect(near, CODEC, 1, WORLD)
                assert far.recv(len(hello)) == hello
                far.close()

    with nothing_left():
        asyncio.run(all_of_them())


def test_workers():
    """To their Shutdown, or to an error of the caller's."""

    def serve(sock):
        end = channel.accept(sock, CODEC, 1)
        if isinstance(end, channel.ControlChannel):
            with suppress(ff.ChannelClosed):  # Every second worker ends before it is told to.
                end.send(ff.StartEpoch(ff.EpochPlan(0, 0, 4)))
                end.send(ff.Shutdown())
        ends.append(end)

    ends: list[Any] = []
    with nothing_left(), Server(serve) as server:
        for i in range(2 * TIMES):
            sockets = [pair() for _ in range(2)]
            for _, far in sockets:
                server.give(far)
            (data, _), (control, _) = sockets
            worker = Worker(
                [np.zeros(3, np.float32)], rank=0, world=1, codec=CODEC, data=data, control=control, host=HOST,
                formation=False,
            )  # fmt: skip
            if i % 2:
                with worker:
                    assert [plan.size for plan in worker.plans()] == [4]
                assert worker.ended == ff.Shutdown()
            else:
                with pytest.raises(ZeroDivisionError), worker:
                    raise ZeroDivisionError
            until(lambda: len(ends) == 2)
            while ends:
                ends.pop().close()


def test_workers_that_cannot_start():
    with nothing_left():
        for _ in range(2 * TIMES):
            (data, far_data), (control, far_control) = pair(), pair()
            far_data.close()
            with control, far_control, pytest.raises(ff.HandshakeError):
                Worker([np.zeros(3, np.float32)], rank=0, world=1, codec=CODEC, data=data, control=control)


def test_clusters():
    with nothing_left():
        for _ in range(10):
            with ff.LocalCluster(1, 4, 4, 1) as cluster, socket.create_connection(cluster.address):
                pass

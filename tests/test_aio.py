"""What only asyncio's channels can meet: cancellation at every await, tasks that share a channel (docs/wire.md §7)."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import numpy as np
import pytest
import reference as ref
from channel_support import CODEC, HOST, RANK, WAIT, WAYS, WORLD, exactly, greeting, message_bytes

import flodl_fast as ff
from flodl_fast import aio
from flodl_fast.net import Deadlines

BOTH = pytest.mark.parametrize("way", WAYS)
MODEL = ff.RoundKind.MODEL
STEPS = 400  # more suspensions than any call here has


def run(test):
    """Run a coroutine with a limit; no task may be left, no exception unheard."""

    async def whole():
        unheard = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        await asyncio.wait_for(test, WAIT)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert unheard == []

    asyncio.run(whole())


async def connect(cls, way, **deadlines):
    """A channel of rank 1 in a world of 3, and the far end of its socket, non-blocking."""
    near, far = socket.socketpair()
    far.setblocking(False)
    loop = asyncio.get_running_loop()
    what = "control" if cls is aio.ControlChannel else "data"
    hello, ack = greeting(what, way)
    made = asyncio.ensure_future(
        cls.connect(near, CODEC, RANK, WORLD, host=HOST if way == "direct" else None, deadlines=Deadlines(**deadlines))
    )
    got = b""
    while len(got) < len(hello):
        got += await loop.sock_recv(far, len(hello) - len(got))
    assert got == hello
    await loop.sock_sendall(far, ack)
    return await made, far


async def both(cls, way):
    """A channel of rank 1 in a world of 3, and the one that serves it."""
    near, far = socket.socketpair()
    host = HOST if way == "direct" else None
    return await asyncio.gather(cls.connect(near, CODEC, RANK, WORLD, host=host), aio.accept(far, CODEC, WORLD))


async def cancelled_after(steps, call):
    """Let a call run for so many turns of the loop, then cancel it: (ended by itself, its result)."""
    task = asyncio.ensure_future(call)
    for _ in range(steps):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    try:
        return ended, await task
    except asyncio.CancelledError:
        return ended, None


# ----------------------------------------------------------------------------------------------------- cancellation


@BOTH
def test_a_receive_cancelled_at_every_await(way):
    async def test():
        messages = [ff.SetGlobalStep(i) for i in range(2)]
        data = b"".join(message_bytes(way, m) for m in messages)
        loop = asyncio.get_running_loop()
        for steps in range(STEPS):
            channel, far = await connect(aio.ControlChannel, way)

            async def trickle(far=far):
                for at in range(0, len(data), 9):
                    await loop.sock_sendall(far, data[at : at + 9])
                    await asyncio.sleep(0)

            trickling = asyncio.ensure_future(trickle())
            ended, first = await cancelled_after(steps, channel.recv())
            got = [] if first is None else [first]
            while len(got) < 2:
                got.append(await channel.recv(WAIT))
            assert got == messages
            await trickling
            await channel.close()
            far.close()
            if ended:
                break
        assert 2 < steps < STEPS - 1

    run(test())


@BOTH
def test_a_send_cancelled_at_every_await(way):
    async def test():
        big, small = ff.DashboardSetMetadata(RANK, "x" * (1 << 20)), ff.Exiting(RANK)
        for steps in range(STEPS):
            channel, served = await both(aio.ControlChannel, way)

            async def read(served=served):
                got = []
                while not got or got[-1] != small:
                    got.append(await served.recv())
                return got

            ended, _ = await cancelled_after(steps, channel.send(big))
            sending = asyncio.ensure_future(channel.send(small))
            assert await read() in ([small], [big, small])
            await sending
            await channel.close()
            await served.close()
            if ended:
                break
            # The next time round, the reader is there while the send goes on.
            channel, served = await both(aio.ControlChannel, way)
            reading = asyncio.ensure_future(read(served))
            ended, _ = await cancelled_after(steps, channel.send(big))
            await channel.send(small)
            assert await reading in ([small], [big, small])
            await channel.close()
            await served.close()
            if ended:
                break
        assert 2 < steps < STEPS - 1

    run(test())


@BOTH
def test_a_round_cancelled_at_every_await(way):
    async def test():
        shape = (100_000,)  # More than the sockets hold, so that sending suspends too.
        for steps in range(STEPS):
            channel, served = await both(aio.DataChannel, way)

            async def control(served=served):
                while True:
                    frame = await served.recv()
                    await served.send(ff.RoundFrame([t + 1 for t in frame.tensors], frame.kind, frame.weight))

            controlling = asyncio.ensure_future(control())
            first = [np.full(shape, 5, np.float32)]
            ended, result = await cancelled_after(steps, channel.all_reduce(first, MODEL, 1.0, out=first))
            assert (first[0] == (5 if result is None else 6)).all()
            for i in range(2):
                params = [np.full(shape, i, np.float32), np.zeros(3, np.float32)]
                frame = await channel.all_reduce(params, MODEL, 2.0, out=params)
                assert frame.weight == 2.0
                assert (params[0] == i + 1).all()
                assert (params[1] == 1).all()
            if result is None:
                assert (first[0] == 5).all()  # Nor was it written later.
            await channel.close()
            with pytest.raises(ff.ChannelClosed):
                await controlling
            await served.close()
            if ended:
                break
        assert 2 < steps < STEPS - 1

    run(test())


@BOTH
def test_serving_cancelled_at_every_await(way):
    async def test():
        for steps in range(STEPS):
            channel, served = await both(aio.DataChannel, way)
            mine = [np.full(100_000, 5, np.float32)]
            asking = asyncio.ensure_future(channel.all_reduce(mine, MODEL, 1.0))
            ended, frame = await cancelled_after(steps, served.recv())
            if frame is None:
                frame = await served.recv(WAIT)
            assert (frame.tensors[0] == 5).all()
            # A reply that is cancelled goes out whole, or not at all.
            reply = ff.RoundFrame([frame.tensors[0] * 2], MODEL, 4.0)
            await cancelled_after(steps, served.send(reply))
            again = asyncio.ensure_future(served.send(reply))
            assert (await asking).weight == 4.0
            await channel.close()
            await asyncio.wait({again})
            again.exception()
            await served.close()
            if ended:
                break
        assert 2 < steps < STEPS - 1

    run(test())


def test_a_dial_cancelled_at_every_await():
    async def test():
        loop = asyncio.get_running_loop()
        for steps in range(STEPS):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.setblocking(False)
                dial = aio.DataChannel.connect(listener.getsockname(), CODEC, RANK, WORLD)
                dialling = asyncio.ensure_future(cancelled_after(steps, dial))
                answering = asyncio.ensure_future(loop.sock_accept(listener))
                await asyncio.wait({dialling, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():  # The dial was cancelled before it reached anybody.
                    answering.cancel()
                    await asyncio.wait({answering})
                    assert await dialling == (False, None)
                    continue
                far, _ = await answering
            with suppress(ConnectionError):
                await loop.sock_sendall(far, ref.data_ack())
            ended, channel = await dialling
            if channel is not None:
                await channel.close()
            far.settimeout(WAIT)
            assert exactly(far, 17) in (b"", ref.data_hello(RANK, WORLD))  # The socket was closed either way.
            far.close()
            if ended:
                break
        assert 2 < steps < STEPS - 1

    run(test())


@BOTH
def test_a_round_whose_task_is_ended_closes_the_channel(way):
    """As ``asyncio.run`` does at its end, which no shield withstands."""

    async def test():
        channel, far = await connect(aio.DataChannel, way)
        before = asyncio.all_tasks()
        asking = asyncio.ensure_future(channel.all_reduce([np.zeros(3, np.float32)], MODEL, 1.0))
        await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert channel.closed
        await channel.close()
        far.close()

    run(test())


# ---------------------------------------------------------------------------------------------------- shared, large


@BOTH
def test_two_senders_and_a_slow_reader(way):
    """Case 15."""

    async def test():
        channel, far = await connect(aio.ControlChannel, way)
        loop = asyncio.get_running_loop()
        messages = {name: ff.DashboardSetMetadata(RANK, name * (1 << 20)) for name in "ab"}
        expected = {message_bytes(way, m): name for name, m in messages.items()}
        size = len(next(iter(expected)))

        async def send(name):
            for _ in range(200):
                await channel.send(messages[name])

        senders = [asyncio.ensure_future(send(name)) for name in "ab"]
        counts = {"a": 0, "b": 0}
        buffer = bytearray(size)
        for i in range(400):
            at = 0
            while at < size:
                at += await loop.sock_recv_into(far, memoryview(buffer)[at:])
                if i % 16 == 0 and at < size // 8:
                    await asyncio.sleep(0.0005)
            counts[expected[bytes(buffer)]] += 1
        assert counts == {"a": 200, "b": 200}
        await asyncio.gather(*senders)
        await channel.close()
        far.close()

    run(test())


@BOTH
def test_a_round_of_32_mib(way):
    """Case 16: default settings all around."""

    async def test():
        channel, served = await both(aio.DataChannel, way)
        params = [np.arange(1 << 20, dtype=np.float32) + i for i in range(8)]

        async def control():
            frame = await served.recv()
            await served.send(ff.reduce_frames([frame, frame, None]))

        controlling = asyncio.ensure_future(control())
        frame = await channel.all_reduce([p * 2 for p in params], MODEL, 2.0)
        await controlling
        assert frame.weight == 4.0
        assert all(np.array_equal(a, b) for a, b in zip(frame.tensors, params, strict=True))
        await channel.close()
        await served.close()

    run(test())


def test_rounds_of_several_tasks_take_turns():
    async def test():
        channel, served = await both(aio.DataChannel, "relay")

        async def control():
            for _ in range(3):
                await served.send(await served.recv())

        controlling = asyncio.ensure_future(control())
        results = await asyncio.gather(*(channel.gather(i) for i in range(3)))
        assert [r.tolist() for r in results] == [[0, i, 0] for i in range(3)]
        await controlling
        await channel.close()
        await served.close()

    run(test())


@BOTH
def test_a_silent_peer(way):
    """Case 19."""

    async def test():
        channel, far = await connect(aio.ControlChannel, way)
        far.send(message_bytes(way, ff.Throttle())[:12])
        with pytest.raises(TimeoutError):
            await channel.recv(timeout=1)
        pending = [
            asyncio.ensure_future(channel.recv()),
            asyncio.ensure_future(channel.send(ff.DashboardSetMetadata(RANK, "x" * (8 << 20)))),
        ]
        await asyncio.sleep(0.05)
        await channel.close()
        for call in pending:
            with pytest.raises(ff.ChannelClosed, match="this side has closed it"):
                await call
        far.close()

    run(test())


def test_messages_are_read_no_faster_than_they_are_taken():
    async def test():
        channel, far = await connect(aio.ControlChannel, "relay")
        far.setblocking(False)
        data = message_bytes("relay", ff.SetGlobalStep(1)) * 10_000
        sent = 0
        for _ in range(200):
            try:
                while True:
                    sent += far.send(data[sent % len(data) :])
            except BlockingIOError:
                await asyncio.sleep(0.001)
        assert sent < 4 << 20  # The far end had to stop.
        for _ in range(1000):
            assert await channel.recv(WAIT) == ff.SetGlobalStep(1)
        await channel.close()
        far.close()

    run(test())


def test_a_context_closes_its_channel():
    async def test():
        channel, far = await connect(aio.ControlChannel, "direct")
        async with channel:
            await channel.send(ff.Exiting(RANK))
        assert channel.closed
        assert channel.fileno() == -1
        far.setblocking(True)
        expected = message_bytes("direct", ff.Exiting(RANK))
        assert exactly(far, len(expected) + 1) == expected
        far.close()

    run(test())

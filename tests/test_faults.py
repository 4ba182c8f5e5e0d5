"""Training over networks that fail: the right end or a loud one, and never two different ones (docs/reliability.md)."""

from __future__ import annotations

import os
import queue
import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from channel_support import CODEC, Flavour, running
from fault_proxy import Fault, Network
from faults import KINDS, Trial, clean
from local_support import stack, train  # noqa: F401
from namespaces import Line
from worker_support import WAIT, Running, until

import flodl_fast as ff
from flodl_fast.net import Deadlines

pytestmark = pytest.mark.skipif(
    os.environ.get("FLODL_FAST_SHA256") == "portable", reason="networks fail alike whatever the kernels"
)

# Each kind of fault, those that take little time to be told.
SEEDS = {"crate": range(6, 14), "local": (2, 3, 7, 8, 9, 11, 13)}


@pytest.mark.parametrize("controller", SEEDS)
def test_random_faults(request, controller):
    binary = request.getfixturevalue("peer_binary") if controller == "crate" else None
    trials = [Trial.of(seed, (controller,)) for seed in SEEDS[controller]]
    threads = threading.active_count()
    with Network() as network, ThreadPoolExecutor(len(trials)) as pool:
        ended = [Counter(outcome) for outcome in pool.map(lambda trial: trial.run(network, binary), trials)]
    for trial, outcome in zip(trials, ended, strict=True):
        assert trial.lethal or outcome == {"ended": 3}
    assert set(network.injected) == {"cut", "freeze", "half_close", "pause", *(["stall"] if binary else [])}
    until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("flavour", ["blocking", "asyncio"])
def test_what_comes_is_what_was_sent(flavour):
    """Message by message in both directions, up to where the fault is, and an error then."""
    faults = [Fault.drawn(random.Random(i), KINDS[i % len(KINDS)], 150_000) for i in range(24)]
    made = Flavour(flavour)
    try:
        with Network() as network, ThreadPoolExecutor(len(faults)) as pool:
            list(pool.map(lambda fault: exchange(made, network, fault), faults))
    finally:
        made.close()


def exchange(flavour, network, fault):
    fault = replace(fault, pause=min(fault.pause, 3.0))
    wait = 2 if fault.lethal else WAIT
    waits = Deadlines(
        attempts=1, first_bytes=wait, handshake=wait, write_stall=wait, starvation=wait, liveness=wait
    )
    sent = [ff.DashboardSetMetadata(0, str(i) * 1000 * (i % 7)) for i in range(40)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = network.proxy(listener.getsockname(), fault)
        dialled = running(flavour.ControlChannel.connect, address, CODEC, 0, 1, deadlines=waits)
        served = running(flavour.accept, listener.accept()[0], CODEC, 1, deadlines=waits)
    ends = []
    for opening in (served, dialled):
        try:
            ends.append(flavour.keep(opening.result(WAIT)))
        except ff.HandshakeError:
            assert fault.lethal
    if len(ends) == 2:
        work = [running(send_all, end, sent) for end in ends] + [running(receive_all, end, len(sent)) for end in ends]
        results = [each.result(WAIT) for each in work]
        assert fault.lethal or results[:2] == [len(sent)] * 2
        for got, error in results[2:]:
            assert got == sent[: len(got)]
            assert error is None if len(got) == len(sent) else fault.lethal and isinstance(error, ff.ChannelError)
    for end in ends:
        end.close()


def send_all(channel, messages):
    """How many it has sent, None if it could not send all."""
    try:
        for message in messages:
            channel.send(message)
    except ff.ChannelError:
        return None
    return len(messages)


def receive_all(channel, count):
    """What came, and the error that ended it."""
    got = []
    try:
        while len(got) < count:
            got.append(channel.recv(WAIT, liveness=channel.deadlines.liveness))
    except ff.ChannelError as error:
        return got, error
    return got, None


def test_a_long_thin_lossy_line(stack):  # noqa: F811
    """50 ms each way, 1 % of the packets lost, 10 Mbit/s: real losses, between two network namespaces."""
    met: queue.Queue[Any] = queue.Queue()
    over = threading.Event()

    def control():
        line.enter(0)
        with stack("--hosts", "0;1;2", "--samples", 24, "--batch", 4, "--epochs", 2) as running:
            address = network.proxy(running.controller, Fault(delay=line.late), line.addresses[0])
            for rank in range(3):
                met.put({**running.options(rank, direct=True), "data": address, "control": address})
            over.wait(WAIT)
            return running.lines()[-1]

    def rank(options):
        line.enter(1)
        return train(options, batch=4, in_step=True, size=25_000)

    with Line(delay=0.05, loss=1, rate="10mbit") as line, Network(partial(line.enter, 0)) as network:
        controller = Running(control)
        ranks = [Running(rank, met.get(timeout=WAIT)) for _ in range(3)]
        trained = [rank.result() for rank in ranks]
        lost = line.lost()
        over.set()
        result = controller.result()
    assert lost > 0
    assert (result["avg_count"], result["dead"]) == (4, 0)
    expected = clean(np.array([[0, 0], [1, -1], [2, -2]], np.float32), 4)
    for seen in trained:
        assert [np.unique(array).tolist() for array in seen.params] == [[value] for value in expected]

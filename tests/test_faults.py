"""Training over networks that fail: the right end or a loud one, and never two different ones (docs/reliability.md)."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from fault_proxy import Fault, Network
from faults import Trial, clean
from local_support import stack, train  # noqa: F401
from namespaces import Line
from worker_support import WAIT, Running, until

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
    until(lambda: threading.active_count() == threads)


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
            over.wait(60)
            return running.lines()[-1]

    def rank(options):
        line.enter(1)
        return train(options, batch=4, in_step=True, size=25_000)

    with Line(delay=0.05, loss=1, rate="10mbit") as line, Network(partial(line.enter, 0)) as network:
        controller = Running(control)
        ranks = [Running(rank, met.get(timeout=WAIT)) for _ in range(3)]
        trained = [rank.result(60) for rank in ranks]
        lost = line.lost()
        over.set()
        result = controller.result()
    assert lost > 0
    assert (result["avg_count"], result["dead"]) == (4, 0)
    expected = clean(np.array([[0, 0], [1, -1], [2, -2]], np.float32), 4)
    for seen in trained:
        assert [np.unique(array).tolist() for array in seen.params] == [[value] for value in expected]

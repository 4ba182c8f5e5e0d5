"""What the tests of LocalCluster and join share, and what lets one test drive the crate's controller and ours.

    from local_support import stack  # noqa: F401

    def test_something(stack):
        with stack("--hosts", "0,1;2", "--epochs", 5) as running:
            ...

``running`` is a worker_support.Stack or a LocalStack: both have the same attributes and print the same lines.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import SALT
from worker_support import WAIT, Running, Stack, await_update, named, settle

import flodl_fast as ff
from flodl_fast.local import LocalCluster
from flodl_fast.worker import Worker

# The join agent as a program, for what only a process can show.
AGENT = [sys.executable, "-m", "flodl_fast", "join"]


class LocalStack:
    """LocalCluster with the options and the output of `peer stack`."""

    def __init__(self, *options: Any, revision: str = "0.6", dial_in: float | None = None) -> None:
        self.codec = ff.Codec(SALT, revision)
        parser = argparse.ArgumentParser()
        parser.add_argument("--hosts", default="0,1")
        parser.add_argument("--policy", choices=["sync"])
        for name, default in (("samples", 1024), ("batch", 32), ("epochs", 3), ("heartbeat-timeout", 30)):
            parser.add_argument(f"--{name}", type=int, default=default)
        args = parser.parse_args(list(map(str, options)))
        self.world = args.hosts.replace(";", ",").count(",") + 1
        self._cluster = LocalCluster(
            self.world, args.samples, args.batch, args.epochs, salt=SALT, revision=revision,
            heartbeat_timeout=args.heartbeat_timeout, dial_in=dial_in,
        )  # fmt: skip

    def options(self, rank: int, direct: bool = False) -> dict[str, Any]:
        """The keywords of Worker that make it this rank."""
        data, control = ("127.0.0.1", self.relays["data", rank][1]), ("127.0.0.1", self.relays["control", rank][1])
        if direct:
            data = control = self.controller
        host = f"direct{rank}" if direct else None
        return {"rank": rank, "world": self.world, "codec": self.codec, "data": data, "control": control, "host": host}

    def lines(self, timeout: float = WAIT) -> list[dict[str, Any]]:
        """What `peer stack` prints after its first line, once the run is over."""
        result = self._cluster.wait(timeout)
        shown = ("epoch", "avg_loss", "epoch_ms", "scalars")
        epochs = [{"epoch_metrics": {name: getattr(m, name) for name in shown}} for m in result.epochs]
        done = {
            "done": True,
            "avg_count": result.averages,
            "version": result.averages,
            "global_step": result.global_step,
            "last_epoch": len(result.epochs) - 1,
            "dead": len(result.dead),
        }
        return [*epochs, done]

    def __enter__(self) -> LocalStack:
        self._cluster.__enter__()
        self.controller = self._cluster.address
        data, control = self._cluster.relay_ports
        self.relays = {
            (channel, rank): ("127.0.0.1", port)
            for channel, port in (("data", data), ("control", control))
            for rank in range(self.world)
        }
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)


@pytest.fixture(params=["crate", "local"])
def stack(request: pytest.FixtureRequest) -> Callable[..., Stack | LocalStack]:
    """Starts the crate's controller, or a LocalCluster, with the options of `peer stack` and a revision."""
    if request.param == "local":
        return LocalStack
    build = request.getfixturevalue("peer_build")
    return lambda *options, revision="0.6": Stack(build(revision), *options, revision=revision)


class Trained:
    """What a rank that ``train`` has run saw and ended with."""

    def __init__(self) -> None:
        self.params: list[np.ndarray] = []
        self.picks: dict[int, list[int]] = {}  # by epoch
        self.messages: list[ff.ControlMsg] = []

    @property
    def averages(self) -> int:
        """How many it has taken part in."""
        return sum(isinstance(message, ff.Update) for message in self.messages)


def train(
    options: dict[str, Any],
    batch: int = 32,
    pause: float = 0.0,
    tensors: int = 2,
    in_step: bool = False,
    settled: bool = False,
    size: int = 6,
    seen: Trained | None = None,
) -> Trained:
    """A rank's plain loop: its model starts at its number and gains 0.5 a batch, its loss is its number.

    The first of its tensors has ``size`` values, ``options`` are the worker's, and ``seen`` is filled as it goes on.

    In step, it waits for an average after each batch. Where all ranks do so, and have as many batches, no outcome
    depends on who is faster: the crate may otherwise see the ranks' reports before their batches, and begin the next
    epoch first. Settled, a plan's report at least follows its batches, and nothing is trained while an average is open
    (see ``worker_support.settle`` and ``await_update``).
    """
    seen = seen or Trained()
    rank = options["rank"]
    seen.params = [np.full(size, rank, np.float32), np.full((2, 3), -rank, np.float32)][:tensors]
    options = {"formation": False, **options}
    with Worker(named(seen.params), on_message=seen.messages.append, **options) as worker:
        for plan in worker.plans():
            for picks in plan.batches(batch):
                if settled:
                    await_update(worker, seen.messages)
                seen.picks.setdefault(plan.epoch, []).extend(picks.tolist())
                for array in seen.params:
                    array += np.float32(0.5)
                worker.log("rank", rank)
                time.sleep(pause)
                worker.step(float(rank))
                while in_step and worker.ended is None and seen.averages < worker.steps:
                    worker.serve()
                    time.sleep(0.001)
            if settled:
                settle(worker, seen.messages)
    return seen


def start(options: dict[str, Any], **keywords: Any) -> Running:
    """``train`` in a thread."""
    return Running(train, options, **keywords)

"""Train for a long time and watch the processes (make soak): run after run of three ranks, one killed now and then.

The ranks are processes that live through all runs, the published crate's controller and LocalCluster take turns.
Between two runs each process must have as many file descriptors and threads as at first, and no more memory.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from operator import gt
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from local_support import LocalStack
from peer import build, find_cargo
from worker_support import CODEC, Running, Stack

import flodl_fast as ff
from flodl_fast.worker import Worker

WORLD, BATCH, EPOCHS = 3, 4, 10
VICTIM = 2  # the rank that is killed; the others live through all runs
KILL_EVERY = 5  # runs
WARM_UP = 20  # runs of a process before its memory is taken for what it needs
GROWTH = 8 << 20  # bytes that its memory may grow by from then on
RUN_LIMIT = 180.0  # seconds
SILENCE = 20  # seconds after which a controller takes a rank for dead
SETTLING = 5.0  # seconds in which the system lets go of a thread that has been joined
SIZES = (1000, 50_000)  # values of the model
CONTROLLERS = {"crate": (60, 0.002), "local": (300, 0.0)}  # batches of a rank's epoch, seconds of one


# --------------------------------------------------------------------------------------------------------- a rank


def rank_process() -> None:
    """Be one rank after the other, as the lines on standard input say."""
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = train(order)
        except ff.FlodlError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def train(order: dict[str, Any]) -> dict[str, Any]:
    rank, pause, size = order["rank"], order["pause"], order["size"]
    params = [np.full(size, rank, np.float32), np.full((2, 3), -rank, np.float32)]
    updates = 0

    def hear(message: ff.ControlMsg) -> None:
        nonlocal updates
        updates += isinstance(message, ff.Update)

    where = {"data": tuple(order["data"]), "control": tuple(order["control"]), "host": order["host"]}
    with Worker(params, rank=rank, world=WORLD, codec=CODEC, on_message=hear, **where) as worker:
        for plan in worker.plans():
            for _ in plan.batches(BATCH):
                for array in params:
                    array += np.float32(0.5)
                time.sleep(pause)
                worker.step(float(rank))
    digest = hashlib.sha256(b"".join(array.tobytes() for array in params)).hexdigest()
    return {"rounds": 1 + 2 * updates, "steps": worker.steps, "params": digest}  # formation; counts and parameters


# ------------------------------------------------------------------------------------------------------- watching


@dataclass
class Watched:
    """What a process has: memory in bytes, file descriptors, threads."""

    name: str
    process: psutil.Process
    runs: int = 0
    first: tuple[int, int, int] | None = None
    last: tuple[int, int, int] = (0, 0, 0)
    peak: tuple[int, int, int] = (0, 0, 0)

    def now(self) -> tuple[int, int, int]:
        with self.process.oneshot():
            return self.process.memory_info().rss, self.process.num_fds(), self.process.num_threads()

    def look(self) -> None:
        """In the middle of a run."""
        with contextlib.suppress(psutil.Error):
            self.peak = tuple(map(max, self.peak, self.now()))  # type: ignore[assignment]

    def rest(self) -> None:
        """Between two runs."""
        self.runs += 1
        until = time.monotonic() + SETTLING
        while self._more(now := self.now()) and time.monotonic() < until:
            time.sleep(0.01)
        self.last = now
        if self.runs <= WARM_UP:
            self.first = self.last

    def _more(self, now: tuple[int, int, int]) -> bool:
        """Whether there are more descriptors or threads than at first."""
        return self.first is not None and any(map(gt, now[1:], self.first[1:]))

    def faults(self) -> list[str]:
        if self.first is None or self.runs <= WARM_UP:
            return []
        found = []
        if self._more(self.last):
            found.append(f"{self.name}: {self.last[1:]} descriptors and threads, {self.first[1:]} at first")
        if self.last[0] - self.first[0] > GROWTH:
            found.append(f"{self.name}: its memory has grown by {(self.last[0] - self.first[0]) / 2**20:.1f} MiB")
        return found

    def __str__(self) -> str:
        first = self.first or self.last

        def show(values: tuple[int, int, int]) -> str:
            return f"{values[0] / 2**20:.1f} MiB, {values[1]} fds, {values[2]} threads"

        return f"{self.name}: {self.runs} runs; first {show(first)}; last {show(self.last)}; peak {show(self.peak)}"


class Rank:
    """A rank's process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.watched = Watched(f"rank {number}", psutil.Process(self.process.pid))

    def train(self, order: dict[str, Any]) -> Running:
        """Its answer, to be waited for; None from one that is killed."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Running(self._answer)

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Soak:
    """Run after run.

    Attributes:
        counts: of what has happened.
        faults: what must not have.
    """

    def __init__(self, controllers: list[str], binary: Path | None, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._controllers, self._binary = controllers, binary
        self._rng = random.Random(seed)
        self._ranks = [Rank(number) for number in range(WORLD)]
        self._here = Watched("LocalCluster and this program", psutil.Process())
        self._retired: list[Watched] = []
        self._crate = (0, 0, 0)

    def run(self, number: int) -> None:
        """One run, from a new controller to all ranks' ends."""
        kind = self._controllers[number % len(self._controllers)]
        batches, pause = CONTROLLERS[kind]
        direct, size = self._rng.random() < 0.5, self._rng.choice(SIZES)
        options = (
            "--hosts", "0,1;2", "--samples", WORLD * BATCH * batches, "--batch", BATCH, "--epochs", EPOCHS,
            "--heartbeat-timeout", SILENCE,
        )  # fmt: skip
        killed = number % KILL_EVERY == KILL_EVERY - 1
        with self._controller(kind, options) as controller:
            watched = [rank.watched for rank in self._ranks] + [self._here]
            if kind == "crate":
                watched.append(Watched("crate", psutil.Process(controller.process.pid)))
            answers = []
            for rank in self._ranks:
                order = controller.options(rank.number, direct)
                order = {name: order.get(name) for name in ("data", "control", "host", "rank")}
                answers.append(rank.train({**order, "size": size, "pause": pause}))
            with _looking(watched):
                if killed:
                    time.sleep(self._rng.uniform(0.2, 3))
                    self._ranks[VICTIM].kill()
                outcomes = [answer.result(RUN_LIMIT) for answer in answers]
                for answer in answers:
                    answer.join()  # Its thread is not to be counted.
            if kind == "crate":
                self._crate = tuple(map(max, self._crate, watched[-1].peak))  # type: ignore[assignment]
        self._judge(f"run {number} ({kind}{', killed' if killed else ''})", outcomes, killed)
        self.counts[f"runs, {kind}"] += 1
        self.counts["rounds of a rank"] += max((o or {}).get("rounds", 0) for o in outcomes)
        if killed:
            self.counts["ranks killed"] += 1
            self._retired.append(self._ranks[VICTIM].watched)
            self._ranks[VICTIM].close()
            self._ranks[VICTIM] = Rank(VICTIM)
        for watch in [rank.watched for rank in self._ranks] + [self._here]:
            if watch.name != f"rank {VICTIM}" or not killed:
                watch.rest()

    def _controller(self, kind: str, options: tuple[Any, ...]) -> Any:
        if kind == "local":
            return LocalStack(*options)
        assert self._binary is not None
        return Stack(self._binary, *options, max_secs=int(RUN_LIMIT))

    def _judge(self, where: str, outcomes: list[dict[str, Any] | None], killed: bool) -> None:
        good = [outcome for outcome in outcomes if outcome is not None and "params" in outcome]
        failed = [outcome["error"] for outcome in outcomes if outcome is not None and "error" in outcome]
        self.counts["ranks that trained to the end"] += len(good)
        self.counts["ranks that failed loudly"] += len(failed)
        if len({outcome["params"] for outcome in good}) > 1:
            self.faults.append(f"{where}: parameters differ: {outcomes}")
        if not killed and len(good) < WORLD:
            self.faults.append(f"{where}: {failed or 'a rank is gone'}")

    def watched(self) -> list[Watched]:
        """Each process of ours; of those that were killed the one that lived longest."""
        oldest = sorted(self._retired, key=lambda watch: watch.runs)[-1:]
        return [*(rank.watched for rank in self._ranks), *oldest, self._here]

    def report(self) -> None:
        print(", ".join(f"{n:,} {what}" for what, n in self.counts.items()))
        for watch in self.watched():
            print(watch)
        memory, descriptors, threads = self._crate
        print(f"crate: peak {memory / 2**20:.1f} MiB, {descriptors} fds, {threads} threads")

    def close(self) -> None:
        for watch in self.watched():
            self.faults += watch.faults()
        for rank in self._ranks:
            rank.close()


@contextlib.contextmanager
def _looking(watched: list[Watched]) -> Any:
    """Look at the processes once a second."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(1.0):
            for watch in watched:
                watch.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description="Train for a long time and watch the processes.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_process()
        return 0
    cargo = find_cargo()
    controllers = ["crate", "local"] if cargo else ["local"]
    if not cargo:
        print("the crate's controller is left out: no cargo was found")
    soak = Soak(controllers, build(cargo) if cargo else None, args.seed)
    began = said = time.monotonic()
    number = 0
    try:
        while time.monotonic() - began < args.minutes * 60 and not soak.faults:
            soak.run(number)
            number += 1
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"after {said - began:.0f} s: {dict(soak.counts)}", flush=True)
    finally:
        soak.close()
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    soak.report()
    for fault in soak.faults:
        print("FAULT", fault)
    return bool(soak.faults)


if __name__ == "__main__":
    sys.exit(main())

"""Training over networks that fail: one trial from a seed, and as a program many of them (make test-faults).

What holds of every trial:

- Each rank ends before the last of its deadlines could have passed: by the coordinator's Shutdown, or by a FlodlError.
- All ranks that end by a Shutdown have the same parameters, bit for bit.
- Where nothing worse happened than delays, pauses and pieces, all of them do, with the parameters of a clean run.
- A join agent whose way to the crate's controller fails ends in time with one of its exit codes, and so do the others;
  ranks that train to the end have the same parameters.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fault_proxy import LETHAL, Fault, Network
from local_support import AGENT, LocalStack, Trained, start
from peer import build, find_cargo
from worker_support import Stack

import flodl_fast as ff
from flodl_fast.join import Exit
from flodl_fast.net import Deadlines

WORLD, BATCH, EPOCHS = 3, 4, 2
BATCHES = 4  # of a rank in an epoch
# Where a fault is lethal, so that its end comes soon; elsewhere a busy machine shall not pass for one.
HEARTBEAT_TIMEOUT = 5  # seconds
DIAL_IN = 15  # seconds, as the crate has them by the scale below
DEADLINES = Deadlines(attempts=3, pause=0.1, handshake=4, write_stall=4, reply=6, starvation=5, liveness=5)
BOUND = 60.0  # seconds for a rank: its deadlines one after the other, and the training itself
JOIN_BOUND = 90.0  # seconds for an agent
KINDS = (None, "pause", *LETHAL)


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        seed: all else follows from it.
        controller: "crate" or "local".
        revision: what all of them speak.
        direct: whether the ranks dial the controller itself.
        formation: whether they begin with rank 0's values.
        size: the values of the model's first tensor.
        faults: by channel and rank.
    """

    seed: int
    controller: str
    revision: str
    direct: bool
    formation: bool
    size: int
    faults: dict[tuple[str, int], Fault]

    @classmethod
    def of(cls, seed: int, controllers: tuple[str, ...] = ("crate", "local"), revision: str = "0.6") -> Trial:
        rng = random.Random(seed)
        size = rng.choice([6, 6, 100_000])
        kind = KINDS[seed % len(KINDS)]
        legs = [(channel, rank) for channel in ("data", "control") for rank in range(WORLD)]
        bad = rng.choice(legs)
        faults = {}
        for leg in legs:
            span = 2 * EPOCHS * BATCHES * (4 * size + 200) // 2 if leg[0] == "data" else 3000
            fault = Fault.drawn(rng, kind if leg == bad else None, span)
            if fault.rate is not None and size > 1000:  # A frame takes half a second at most.
                fault = replace(fault, rate=max(fault.rate, 8.0 * size))
            faults[leg] = fault
        return cls(seed, rng.choice(controllers), revision, rng.random() < 0.5, rng.random() < 0.5, size, faults)

    @property
    def lethal(self) -> bool:
        return any(fault.lethal for fault in self.faults.values())

    def __str__(self) -> str:
        bad = {leg: fault for leg, fault in self.faults.items() if fault.kind}
        where = f"{self.controller} at {self.revision}, {'direct' if self.direct else 'relay'}"
        return f"seed {self.seed}: {where}, formation={self.formation}, {self.size} values, {bad}"

    def run(self, network: Network, binary: Path | None) -> Counter[str]:
        """Train; how many ranks ended in which way.

        Raises:
            AssertionError: something that must hold does not.
        """
        options = (
            "--hosts", "0,1;2", "--samples", WORLD * BATCH * BATCHES, "--batch", BATCH, "--epochs", EPOCHS,
            "--heartbeat-timeout", HEARTBEAT_TIMEOUT if self.lethal else int(BOUND),
        )  # fmt: skip
        if self.controller == "local":
            dial_in = DIAL_IN if self.lethal else None
            controller: Any = LocalStack(*options, revision=self.revision, dial_in=dial_in)
        else:
            assert binary is not None
            env = {**os.environ, "FLODL_NET_TIMEOUT_SCALE": "0.25" if self.lethal else "1"}
            controller = Stack(binary, *options, revision=self.revision, env=env, max_secs=int(2 * BOUND))
        until = time.monotonic() + BOUND
        with controller:
            ranks = []
            seen = [Trained() for _ in range(WORLD)]
            for rank in range(WORLD):
                worker = controller.options(rank, self.direct)
                for channel in ("data", "control"):
                    worker[channel] = network.proxy(worker[channel], self.faults[channel, rank])
                worker |= {"deadlines": DEADLINES if self.lethal else Deadlines(), "formation": self.formation}
                # A death leaves the others with different numbers of batches: nobody waits for an average then.
                keywords = {"in_step": not self.lethal, "size": self.size, "seen": seen[rank]}
                ranks.append(start(worker, batch=BATCH, pause=0.002, **keywords))
            outcomes = [self._outcome(rank, until) for rank in ranks]
        return self._judge(outcomes, seen)

    def _outcome(self, rank: Any, until: float) -> Any:
        try:
            return rank.result(max(0.0, until - time.monotonic()))
        except ff.FlodlError as error:
            return error
        except queue.Empty:
            return None

    def _judge(self, outcomes: list[Any], seen: list[Trained]) -> Counter[str]:
        told = [
            (outcome, rank.averages, [type(message).__name__ for message in rank.messages[-3:]])
            for outcome, rank in zip(outcomes, seen, strict=True)
        ]
        assert None not in outcomes, f"{self}: a rank has not ended in {BOUND} s: {told}"
        good = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        ends = {b"".join(array.tobytes() for array in rank.params) for rank in good}
        assert len(ends) <= 1, f"{self}: ranks that all report success have different parameters: {_values(good)}"
        if not self.lethal:
            assert len(good) == WORLD, f"{self}: {told}"
            begin = np.array([[0 if self.formation else rank, 0 if self.formation else -rank] for rank in range(WORLD)])
            expected = [[value] for value in clean(begin.astype(np.float32), EPOCHS * BATCHES)]
            assert _values(good) == expected, f"{self}: not as a clean run"
        return Counter("ended" if outcome in good else type(outcome).__name__ for outcome in outcomes)


class JoinTrial:
    """Two join agents at the crate's join window, one of them through a faulty network.

    Args:
        seed: all else follows from it.
        revision: what all of them speak.
    """

    def __init__(self, seed: int, revision: str) -> None:
        self.fault = Fault.drawn(random.Random(seed), KINDS[seed % len(KINDS)], 1500)
        self._revision = revision
        self._text = f"join at {revision}, seed {seed}: {self.fault}"

    def __str__(self) -> str:
        return self._text

    def run(self, network: Network, binary: Path) -> Counter[str]:
        """Join and train; how many agents ended in which way.

        Raises:
            AssertionError: something that must hold does not.
        """
        env = {**os.environ, "FLODL_NET_TIMEOUT_SCALE": "0.2"}
        options = ("--join", "--ranks", 2, "--epochs", EPOCHS)
        joins = ["--revision", self._revision, "--", sys.executable, "-c", RANK]
        with Stack(binary, *options, revision=self._revision, env=env, max_secs=int(2 * JOIN_BOUND)) as controller:
            addresses = network.proxy(controller.controller, self.fault), controller.controller
            agents = [
                subprocess.Popen(
                    [*AGENT, "{}:{}".format(*address), "--host", f"host{i}", *joins],
                    env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for i, address in enumerate(addresses)
            ]  # fmt: skip
            until = time.monotonic() + JOIN_BOUND
            try:
                shown = [agent.communicate(timeout=max(0.0, until - time.monotonic())) for agent in agents]
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{self}: an agent has not ended in {JOIN_BOUND} s") from None
            finally:
                for agent in agents:
                    agent.kill()
                    agent.communicate()
        codes = [Exit(agent.returncode) for agent in agents]
        trained = {out for (out, _), code in zip(shown, codes, strict=True) if code == Exit.OK}
        ends = {text.partition("]")[2] for text in trained}
        assert len(ends) <= 1, f"{self}: ranks that all report success have different parameters: {shown}"
        assert self.fault.lethal or codes == [Exit.OK] * 2, f"{self}: {codes}, {shown}"
        return Counter(code.name for code in codes)


RANK = """
import time
import numpy as np
import flodl_fast as ff

params = np.zeros(6, np.float32)
with ff.Worker.from_env({"weight": params}) as worker:
    for plan in worker.plans():
        for _ in plan.batches(32):
            params += 0.5
            time.sleep(0.002)
            worker.step(1.0)
print(params.tobytes().hex())
"""


def clean(ranks: np.ndarray, averages: int) -> list[float]:
    """What the ranks' values, a row each, come to where each gains 0.5 before each average: the crate's arithmetic."""
    ranks = ranks.copy()
    for _ in range(averages):
        ranks += np.float32(0.5)
        ranks[:] = (ranks[0] + ranks[1] + ranks[2]) * np.float32(1 / 3)
    return ranks[0].tolist()


def _values(ranks: list[Any]) -> list[list[float]]:
    """The different values of each tensor."""
    return [np.unique([rank.params[i] for rank in ranks]).tolist() for i in range(2)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train over networks that fail, again and again.")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--joins", type=int, default=None, help="trials of join agents (default: a tenth as many)")
    revisions = [revision.value for revision in ff.Revision]
    parser.add_argument("--revision", default="0.6", choices=revisions, help="that all of them speak")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=int, default=6, help="trials at a time")
    args = parser.parse_args()
    cargo = find_cargo()
    binary = build(cargo, f"{args.revision}.0") if cargo else None
    controllers = ("crate", "local") if binary else ("local",)
    print(f"controllers: {', '.join(controllers)}")
    joins = args.trials // 10 if args.joins is None else args.joins
    trials: list[Trial | JoinTrial] = [
        Trial.of(args.first + i, controllers, args.revision) for i in range(args.trials)
    ]
    if binary:
        trials += [JoinTrial(args.first + i, args.revision) for i in range(joins)]
    ends: Counter[str] = Counter()
    failed = 0
    began = time.monotonic()
    with Network() as network, ThreadPoolExecutor(args.at_once) as pool:
        for running in [pool.submit(trial.run, network, binary) for trial in trials]:
            try:
                ends.update(running.result())
            except Exception as error:
                failed += 1
                print(f"FAILED {type(error).__name__} {error}", flush=True)
        took = time.monotonic() - began
        joined = len(trials) - args.trials
        print(f"{len(trials)} runs in {took:.0f} s, {joined} of them by join agents; {failed} failed")
        print(f"faults that came to pass: {sum(network.injected.values())}", dict(sorted(network.injected.items())))
        print(f"bytes through the proxies: {network.bytes:,}")
        print(f"ranks and agents ended: {dict(ends.most_common())}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

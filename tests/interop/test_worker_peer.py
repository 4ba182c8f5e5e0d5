"""Our workers as ranks of a cluster of the published crate: its controller, coordinator, relays and ranks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from conftest import SALT
from worker_support import (
    SPOKEN,
    WAIT,
    Relay,
    Running,
    Stack,
    await_update,
    named,
    peer_ranks,
    rounded,
    running,
    settle,
    until,
)

import flodl_fast as ff
from flodl_fast import worker as module
from flodl_fast.channel import DataChannel
from flodl_fast.rounds import Elided
from flodl_fast.worker import Worker

f32 = np.float32
SAMPLES, BATCH, EPOCHS = 1024, 32, 5
# What every batch is said to take, so long that no average ever takes much beside it. The crate's cadence is planned by
# such times, and where they change its plans in the middle of an epoch, 0.6 may leave the last of them undealt.
BATCH_MS = 1e6


FORMATION = 2  # rounds: parameters and buffers


class Rounds(defaultdict):
    """Every round of every rank: [kind, weight, tensors sent], then also tensors and weight that came.

    A rank that has an event in ``held`` enters its first round after the formation only once that is set.
    """

    def __init__(self):
        super().__init__(list)
        self.held = {}

    def waits(self, rank):
        """Whether a rank waits in a round after the formation."""
        return len(self[rank]) == FORMATION + 1 and len(self[rank][-1]) == 3


@pytest.fixture
def rounds(monkeypatch):
    recorded = Rounds()

    class Recording(DataChannel):
        def all_reduce(self, arrays, kind, weight, out=None, *, scale=None, view=False, wire=None):
            (rank,) = self.ranks
            arrays = list(arrays)
            sent = [np.zeros(a.shape, f32) if isinstance(a, Elided) else np.array(a) for a in arrays]
            entry = [kind, weight, [rounded(a * f32(1 if scale is None else scale), wire) for a in sent]]
            recorded[rank].append(entry)
            if rank in recorded.held and len(recorded[rank]) > FORMATION:
                recorded.held[rank].wait(WAIT)
            reply = super().all_reduce(arrays, kind, weight, out, scale=scale, view=view, wire=wire)
            entry += [[tensor.copy() for tensor in reply.tensors], reply.weight]
            return reply

    monkeypatch.setattr(module, "DataChannel", Recording)
    return recorded


class Rank:
    """One of our ranks in a thread: trains something that depends on its data and its number."""

    def __init__(self, stack, rank, direct=False, **options):
        self.rank = rank
        self.params = [np.full((7, 3), rank + 1, f32), np.linspace(rank, rank + 1, 5, dtype=f32)]
        self.buffers = [np.full(4, rank, f32)]
        buffers = {"running": self.buffers[0], "count": np.zeros(1, np.int64)}
        self.picks = defaultdict(list)
        self.scores = defaultdict(list)
        self.metrics = {}
        self.heard = []
        self.worker = None
        self._options = {**stack.options(rank, direct), "buffers": buffers, "on_message": self.hear, **options}
        self.run = Running(self.train)

    def hear(self, message):
        self.heard.append(message)
        if isinstance(message, ff.EpochAggregated):
            self.metrics[message.metrics.epoch] = message.metrics

    def train(self):
        with Worker(named(self.params), **self._options) as worker:
            self.worker = worker
            for plan in worker.plans():
                for picks in plan.batches(BATCH):
                    await_update(worker, self.heard)
                    self.batch(plan, picks)
                    worker.step(1.0 / (worker.steps + 1), batch_ms=BATCH_MS, lr=0.1)
                settle(worker, self.heard)

    def batch(self, plan, picks):
        self.params[0] *= f32(0.97)
        self.params[0] += f32(picks[0] % 11)
        self.params[1] -= f32(0.01) * f32(picks[-1])
        self.buffers[0] += f32(1 + self.rank)
        score = float(picks.sum() % 101)
        self.picks[plan.epoch] += picks.tolist()
        self.scores[plan.epoch].append(score)
        self.worker.log("score", score)


def bits(arrays):
    return [array.tobytes() for array in arrays]


def averages(frames, weights, relayed, wire):
    """What the crate's reduction can give for three frames, one for each order of adding them up: at most three.

    What travels in bf16 is rounded by a relay that has added up, by the controller, and once more when it is divided.
    """
    inverse = f32(1.0 / sum(weights))
    for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        first, second, third = (frames[i] for i in order)
        sums = (a + b for a, b in zip(first, second, strict=True))
        sums = [rounded(pair, wire if relayed else None) + c for pair, c in zip(sums, third, strict=True)]
        yield [rounded(rounded(total, wire) * inverse, wire) for total in sums]


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("route", ["relays", "direct"])
@SPOKEN
def test_a_cohort_of_ours(peer_build, rounds, route, policy, revision, wire):
    with Stack(
        peer_build(revision), "--hosts", "0,1;2", "--policy", policy, "--epochs", EPOCHS, "--samples", SAMPLES,
        "--batch", BATCH, "--anchor", 3, revision=revision,
    ) as stack:
        ranks = [Rank(stack, rank, direct=route == "direct", bf16_wire=wire == "bf16") for rank in range(3)]
        for rank in ranks:
            rank.run.result()
        *told, done = stack.lines()

    assert {name: done[name] for name in ("done", "dead", "last_epoch")} == {
        "done": True, "dead": 0, "last_epoch": EPOCHS - 1,
    }
    steps = sum(rank.worker.steps for rank in ranks)
    assert done["global_step"] == steps
    assert [rank.worker.global_step for rank in ranks] == [steps] * 3
    assert all(rank.worker.ended == ff.Shutdown() for rank in ranks)

    # Formation and final average leave one state everywhere.
    assert bits(ranks[0].params + ranks[0].buffers) == bits(ranks[1].params + ranks[1].buffers)
    assert bits(ranks[0].params + ranks[0].buffers) == bits(ranks[2].params + ranks[2].buffers)

    # Every round of theirs is NumPy's, in an order of adding up that fits the topology and stays the same.
    mine = [rounds[rank] for rank in range(3)]
    assert len(mine[0]) == len(mine[1]) == len(mine[2])
    fitting = {0} if route == "relays" else {0, 1, 2}  # One relay adds up ranks 0 and 1.
    modelled = 0
    for entries in zip(*mine, strict=True):
        kinds, weights, sent, came, total = zip(*entries, strict=True)
        assert len(set(kinds)) == len(set(total)) == 1
        assert bits(came[0]) == bits(came[1]) == bits(came[2])
        if kinds[0] is ff.RoundKind.MODEL:
            modelled += 1
            assert total[0] == sum(weights)
            possible = averages(sent, weights, route == "relays", wire)
            fitting &= {i for i, average in enumerate(possible) if bits(average) == bits(came[0])}
            assert fitting
        else:
            assert bits(came[0]) == bits([a + b + c for a, b, c in zip(*sent, strict=True)])
    assert modelled == 2 * done["avg_count"]  # Parameters and buffers.

    # The data of an epoch: whole batches, none twice; outside sync all of it.
    for epoch in range(EPOCHS):
        picks = sorted(itertools.chain.from_iterable(rank.picks[epoch] for rank in ranks))
        assert len(set(picks)) == len(picks)
        assert len(picks) == (960 if policy == "sync" else SAMPLES)

    # Scalars come back as the mean of the ranks' means, weighted by their batches.
    printed = {line["epoch_metrics"]["epoch"]: line["epoch_metrics"] for line in told}
    for epoch in range(EPOCHS):
        batches = [len(rank.scores[epoch]) for rank in ranks]
        mean = sum(sum(rank.scores[epoch]) for rank in ranks) / sum(batches)
        for metrics in (printed[epoch]["scalars"], *(rank.metrics[epoch].scalars for rank in ranks)):
            assert metrics["score"] == pytest.approx(mean, rel=1e-12)
        own = [rank.scores[epoch] for rank in ranks]
        assert [scalars.get("score") for scalars in ranks[0].metrics[epoch].per_rank] == [
            pytest.approx(sum(scores) / len(scores)) if scores else None for scores in own
        ]
        told = ranks[0].metrics[epoch]
        assert told.per_rank_samples == ([] if revision == "0.6" else [BATCH * n for n in batches])
        assert [loss is None for loss in told.per_rank_loss] == ([] if revision == "0.6" else [not n for n in batches])


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@SPOKEN
def test_a_mixed_world(peer_build, policy, revision, wire):
    """The crate's ranks 0 and 2 share their relays with ours, and one of ours dials the controller.

    An epoch is one average's batches: where 0.6 ends an epoch within a window, a rank whose report is taken before the
    others' may go into the next one too far ahead, and the last plan of that is never dealt.
    """
    shape, world, window = 50, 5, 4
    with (
        Stack(
            peer_build(revision), "--hosts", "0,1;2,3;4", "--policy", policy, "--epochs", EPOCHS,
            "--samples", world * window * BATCH, "--batch", BATCH, "--anchor", window, revision=revision,
        ) as stack,
        peer_ranks(peer_build(revision), stack, wire) as start,
    ):
        theirs = [start(rank, shape, "--form", "--batch", BATCH, "--batch-ms", BATCH_MS) for rank in (0, 2)]

        def train(rank, direct):
            params = [np.full(shape, rank, f32)]
            begun = None
            heard = []
            options = {"bf16_wire": wire == "bf16", "on_message": heard.append, **stack.options(rank, direct)}
            with Worker(named(params), **options) as worker:
                begun = params[0].tolist()
                for plan in worker.plans():
                    for _ in plan.batches(BATCH):
                        await_update(worker, heard)
                        params[0] += f32(0.5)
                        worker.step(1.0, batch_ms=BATCH_MS, data_ms=0.1)  # as theirs say
                    settle(worker, heard)
            return params[0], worker.steps, begun

        ours = [Running(train, rank, rank == 4) for rank in (1, 3, 4)]
        ends = [run.result() for run in ours]
        reports = [json.loads(process.communicate(timeout=WAIT)[0]) for process in theirs]
        done = stack.lines()[-1]
    assert (done["done"], done["dead"], done["last_epoch"]) == (True, 0, EPOCHS - 1)
    assert [report["ended"] for report in reports] == ["shutdown", "shutdown"]
    assert [begun for _, _, begun in ends] == [[0.0] * shape] * 3
    assert done["global_step"] == sum(steps for _, steps, _ in ends) + sum(report["steps"] for report in reports)
    final = {report["first_param_bits"] for report in reports if report["all_equal"]}
    assert len(final) == 1
    expected = np.full(shape, int(final.pop(), 16), np.uint32).tobytes()
    assert [array.tobytes() for array, _, _ in ends] == [expected] * 3


def test_ranks_of_different_models(peer_build):
    """The crate's 0.8 does not let them train; with it go both."""
    with Stack(peer_build("0.8"), "--hosts", "0;1", revision="0.8") as stack:
        ranks = [
            Running(Worker, {name: np.zeros(3, f32)}, formation=False, **stack.options(rank))
            for rank, name in enumerate(["weight", "wait"])
        ]
        for rank in ranks:
            with pytest.raises(ff.ChannelError):
                next(rank.result().plans())


# ----------------------------------------------------------------------------------------------------------- faults


class Slow(Rank):
    """A rank that is in the middle of its plan for a while."""

    def batch(self, plan, picks):
        time.sleep(0.05)
        super().batch(plan, picks)


@pytest.mark.parametrize("killed", ["controller", "relay"])
def test_killed_in_the_middle_of_a_round(peer_binary, rounds, killed):
    """Rank 0 waits in a round for rank 1, which is held back: its error is clear, and its arrays are as they were."""
    rounds.held[1] = threading.Event()
    with Stack(peer_binary, "--hosts", "0;1", "--samples", SAMPLES, "--batch", BATCH) as stack:
        relays = {name: Relay(stack.relays[name, 0]) for name in ("data", "control") if killed == "relay"}
        waiting = Rank(stack, 0, **{name: relay.address for name, relay in relays.items()})
        held = Rank(stack, 1)
        until(lambda: rounds.waits(0) and rounds.waits(1))
        before = bits(waiting.params + waiting.buffers)
        if killed == "controller":
            stack.process.kill()
        for relay in relays.values():
            relay.kill()
        with pytest.raises(ff.ChannelError):
            waiting.run.result()
        assert bits(waiting.params + waiting.buffers) == before
        assert isinstance(waiting.worker.ended, ff.ChannelError)
        rounds.held[1].set()
        with pytest.raises(ff.ChannelError):
            held.run.result()


CHILD = """
import sys, time
import numpy as np
import flodl_fast as ff
from flodl_fast.worker import Worker

params, buffers = [np.zeros((7, 3), np.float32), np.zeros(5, np.float32)], [np.zeros(4, np.float32)]
with Worker.from_env(params, buffers=buffers) as worker:
    for plan in worker.plans():
        for picks in plan.batches(32):
            time.sleep(0.01)
            worker.step(1.0, batch_ms=1e6)
            print(plan.epoch, int(picks[0]), flush=True)
"""


def child(stack, rank):
    """A rank in a process of its own, as a launcher starts it, that dials the controller."""
    envelope = {
        "controller": {"host": stack.controller[0], "port": stack.controller[1]}, "world_size": stack.world,
        "num_workers": stack.world, "salt": SALT.hex(),
        "worker": {"host": "child", "ranks": [rank], "local_devices": [0], "nccl_socket_ifname": "", "path": "/"},
    }
    env = {
        **os.environ, "FLODL_INTERNAL_CLUSTER_JSON": json.dumps(envelope).encode().hex(), "FLODL_HOST_NAME": "child",
        "FLODL_INTERNAL_LOCAL_RANK": "0", "FLODL_FAST_ROUTE": "direct",
    }
    return running(sys.executable, "-c", CHILD, env=env)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_rank_that_hangs_is_left_behind(peer_binary, monkeypatch, policy):
    """Once its heartbeats have been missed long enough the others go on, with its data; then it is killed."""
    monkeypatch.setattr(module, "HEARTBEAT", 0.1)  # The others' are not to be missed.
    with Stack(
        peer_binary, "--hosts", "0,1;2", "--policy", policy, "--epochs", 2, "--samples", SAMPLES, "--batch", BATCH,
        "--heartbeat-timeout", 3,
    ) as stack, child(stack, 2) as lost:
        survivors = [Slow(stack, rank) for rank in (0, 1)]
        lines = [lost.stdout.readline().split()]
        lost.send_signal(signal.SIGSTOP)
        for rank in survivors:
            rank.run.result()
        done = stack.lines()[-1]
        lost.kill()
        trained = [line.split() for line in lost.communicate()[0].splitlines()]
    assert lost.returncode == -signal.SIGKILL
    assert (done["done"], done["dead"], done["last_epoch"]) == (True, 1, 1)
    assert bits(survivors[0].params) == bits(survivors[1].params)
    first = {pick for rank in survivors for pick in rank.picks[0]}
    theirs = {int(start) + i for epoch, start in lines + trained if epoch == "0" for i in range(BATCH)}
    if policy == "sync":
        # Ranks 0 and 1 have 342 and 341 samples each, and take over what rank 2 has not reported.
        taken = {pick for pick in first if pick >= 683}
        assert taken
        assert not taken & theirs
        assert len(first) >= SAMPLES - len(theirs) - 3 * BATCH
    else:
        assert first | theirs == set(range(SAMPLES))


def test_a_killed_rank_takes_the_rounds_from_all(peer_binary):
    """The crate takes the end of a data connection for the end of training: the others learn it in their next round."""
    with Stack(
        peer_binary, "--hosts", "0,1;2", "--epochs", 2, "--samples", SAMPLES, "--batch", BATCH,
        "--heartbeat-timeout", 3,
    ) as stack, child(stack, 2) as lost:
        others = [Rank(stack, rank) for rank in (0, 1)]
        lost.stdout.readline()
        lost.kill()
        lost.communicate()
        for rank in others:
            with pytest.raises(ff.ChannelError):
                rank.run.result()
            assert isinstance(rank.worker.ended, ff.ChannelError)

"""LocalCluster beside the crate's controller: the same tests for both, and the crate's own ranks trained by either."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from local_support import stack, start  # noqa: F401
from worker_support import SPOKEN, WAIT, peer_ranks

import flodl_fast as ff
from flodl_fast.channel import ControlChannel, DataChannel


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
def test_three_ranks_of_ours(stack, direct, revision):  # noqa: F811
    with stack("--hosts", "0,1;2", "--samples", 96, "--epochs", 5, revision=revision) as running:
        ranks = [start(running.options(rank, direct), in_step=True) for rank in range(3)]
        ranks = [rank.result() for rank in ranks]
        *epochs, done = running.lines()
    assert done == {"done": True, "avg_count": 5, "version": 5, "global_step": 15, "last_epoch": 4, "dead": 0}
    assert [(e["epoch_metrics"]["epoch"], e["epoch_metrics"]["scalars"]) for e in epochs] == [
        (epoch, {"rank": 1.0}) for epoch in range(5)
    ]
    for number, rank in enumerate(ranks):
        assert rank.picks == {epoch: [*range(32 * number, 32 * number + 32)] for epoch in range(5)}
        assert [array.tolist() for array in rank.params] == [[3.5] * 6, [[1.5] * 3] * 2]
        expected: list[Any] = [ff.SetEpochCallbackRole(0)]
        for epoch in range(5):
            plan = ff.EpochPlan(epoch, 32 * number, 32)
            expected += [
                ff.StartEpoch(plan), ff.RequestParams(), ff.Throttle(), ff.Update(epoch + 1),
                ff.SetGlobalStep(3 * epoch + 3), ff.EpochAggregated,
            ]  # fmt: skip
        told = [m for m in rank.messages if not isinstance(m, ff.CoordHeartbeat)]
        assert [type(m) if isinstance(m, ff.EpochAggregated) else m for m in told] == [*expected, ff.Shutdown()]
        aggregated = [m.metrics for m in rank.messages if isinstance(m, ff.EpochAggregated)]
        assert [(m.epoch, m.avg_loss, m.per_rank) for m in aggregated] == [
            (epoch, 1.0, [{"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0}]) for epoch in range(5)
        ]
        each = ([], []) if revision == "0.6" else ([0.0, 1.0, 2.0], [32] * 3)
        assert [(m.per_rank_loss, m.per_rank_samples) for m in aggregated] == [each] * 5
        for metrics in aggregated:
            assert sum(metrics.per_rank_batch_share) == pytest.approx(1)
            np.testing.assert_allclose(
                metrics.per_rank_throughput, 32 / np.array(metrics.per_rank_share_complete_ms), rtol=1e-12
            )


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
def test_many_averages_an_epoch(stack, direct):  # noqa: F811
    with stack("--hosts", "0,1,2", "--samples", 400, "--batch", 4, "--epochs", 3) as running:
        ranks = [start(running.options(rank, direct), batch=4, pause=0.001, settled=True) for rank in range(3)]
        ranks = [rank.result() for rank in ranks]
        *epochs, done = running.lines()
    assert (done["global_step"], done["last_epoch"], done["dead"]) == (3 * 99, 2, 0)
    assert done["avg_count"] >= 6
    assert [e["epoch_metrics"]["avg_loss"] for e in epochs] == [1.0] * 3
    assert len({b"".join(array.tobytes() for array in rank.params) for rank in ranks}) == 1
    sizes = [134, 133, 133]
    for number, rank in enumerate(ranks):
        offset = sum(sizes[:number])
        assert rank.picks == {epoch: [*range(offset, offset + sizes[number] // 4 * 4)] for epoch in range(3)}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
def test_a_silent_rank(stack, monkeypatch, direct):  # noqa: F811
    monkeypatch.setattr("flodl_fast.worker.HEARTBEAT", 0.1)  # The others' are not to be missed.
    with stack("--hosts", "0;1;2", "--samples", 60, "--batch", 2, "--epochs", 2, "--heartbeat-timeout", 3) as running:
        options = running.options(2, direct)
        where = {"host": options.get("host")}
        with (
            DataChannel.connect(options["data"], options["codec"], 2, 3, **where) as data,
            ControlChannel.connect(options["control"], options["codec"], 2, 3, **where) as control,
        ):
            control.send(ff.Heartbeat(2, 0))
            ranks = [start(running.options(rank, direct), batch=2, pause=0.05) for rank in range(2)]
            while not isinstance(control.recv(WAIT), ff.StartEpoch):
                pass
            control.send(ff.Batch(2, 1.0, 0.0, 1))
            control.send(ff.Batch(2, 1.0, 0.0, 2))  # two of its ten batches, and never a word again
            ranks = [rank.result() for rank in ranks]
            done = running.lines()[-1]
            if direct:
                with pytest.raises(ff.ChannelError, match="declared rank 2 dead"):
                    data.gather(0.0)
    assert (done["last_epoch"], done["dead"]) == (1, 1)
    # The others stood still in the first average for want of it, within their plans, which its other 16 samples extend.
    assert sorted(ranks[0].picks[0] + ranks[1].picks[0]) == [*range(40), *range(44, 60)]
    assert [rank.picks[1] for rank in ranks] == [[*range(20)], [*range(20, 40)]]
    assert len({b"".join(array.tobytes() for array in rank.params) for rank in ranks}) == 1


@SPOKEN
def test_ranks_of_the_crate(stack, peer_build, revision, wire):  # noqa: F811
    binary = peer_build(revision)
    with stack("--hosts", "0,1;2", revision=revision) as running, peer_ranks(binary, running, wire) as start_theirs:
        ranks = [start_theirs(rank, 1000) for rank in range(3)]
        ends = [json.loads(rank.communicate(timeout=WAIT)[0]) for rank in ranks]
        *epochs, done = running.lines()
    assert ends == [
        {
            "rank": rank, "ended": "shutdown", "plans": 3, "rounds": 3, "steps": 30,
            "first_param_bits": "41800000", "all_equal": True,
        }
        for rank in range(3)
    ]  # fmt: skip
    assert done == {"done": True, "avg_count": 3, "version": 3, "global_step": 90, "last_epoch": 2, "dead": 0}
    assert [e["epoch_metrics"] for e in epochs] == [
        {"epoch": epoch, "avg_loss": 0.5, "epoch_ms": 10.0, "scalars": {"loss": 0.5}} for epoch in range(3)
    ]


@SPOKEN
def test_ranks_of_the_crate_and_ours_together(stack, peer_build, revision, wire):  # noqa: F811
    with (
        stack("--hosts", "0;1;2", "--samples", 96, revision=revision) as running,
        peer_ranks(peer_build(revision), running, wire) as start_theirs,
    ):
        theirs = start_theirs(1, 6)
        # Its model is one tensor, and so is ours here.
        options = [{**running.options(rank), "bf16_wire": wire == "bf16"} for rank in (0, 2)]
        ours = [start(its, tensors=1, in_step=True) for its in options]
        ours = [rank.result() for rank in ours]
        end = json.loads(theirs.communicate(timeout=WAIT)[0])
        done = running.lines()[-1]
    assert done == {"done": True, "avg_count": 3, "version": 3, "global_step": 9, "last_epoch": 2, "dead": 0}
    assert (end["first_param_bits"], end["all_equal"]) == (np.float32(2.5).tobytes()[::-1].hex(), True)
    assert [rank.params[0].tolist() for rank in ours] == [[2.5] * 6] * 2

"""The demonstration's ranks under the published crate's controller and relays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import SALT
from demo_support import Recording, check_inspect, check_order, check_rounds, read_table
from worker_support import SettlingTap

from flodl_fast import cli, demo
from flodl_fast.capture import Direction


@pytest.mark.parametrize(("revision", "epochs", "accuracy"), [("0.6", 12, 95), ("0.8", 3, 80)])
def test_the_crate_trains_the_same_ranks(peer_build, tmp_path, monkeypatch, capsys, revision, epochs, accuracy):
    peer_build(revision)
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "Tap", SettlingTap)  # Else the crate may end a run without its last average.
    options = ["--revision", revision, "--epochs", str(epochs), "--target", str(accuracy / 100)]
    assert cli.main(["demo", "--peer", *options, "--salt", SALT.hex()]) == 0
    table = read_table(capsys.readouterr().out, epochs)
    assert table.accuracy >= accuracy

    traffic = Recording(Path("demo.cap").read_bytes(), SALT, 3)
    assert len(traffic.records) == table.messages
    check_order(traffic)
    check_inspect(traffic)
    # The first relay adds up ranks 0 and 1, the controller rank 2 to that: the order of the ranks.
    assert check_rounds(traffic) == len(traffic.control(0, Direction.UP, "SyncAck")) > 0
    told = traffic.control(2, Direction.DOWN, "EpochAggregated")
    assert [f"{metrics['avg_loss']:.4f}" for metrics in told] == [f"{loss:.4f}" for loss in table.losses]
    assert [f"{metrics['scalars']['held-out']:.1%}" for metrics in told] == [f"{x:.1f}%" for x in table.held_out]
    assert cli.main([*table.inspect[0].split()[3:], "--json"]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == table.messages

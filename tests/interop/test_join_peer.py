"""The join agent against the crate's join window: two agents form a world and their ranks train in it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from conftest import SALT
from local_support import AGENT
from worker_support import WAIT, Stack

from flodl_fast.join import Exit

# The whole of a rank: its model starts at its number and gains 0.5 a batch. It waits for an average after each (see
# local_support.train).
RANK = textwrap.dedent("""
    import time
    import numpy as np
    import flodl_fast as ff
    from flodl_fast.environment import Environment
    from flodl_fast.worker import Worker

    environment = Environment.read()
    params = [np.full((4, 5), environment.rank, np.float32)]
    heard = []
    options = {"environment": environment, "formation": False, "on_message": heard.append}
    with Worker.from_env({"weight": params[0]}, **options) as worker:
        for plan in worker.plans():
            for picks in plan.batches(32):
                params[0] += np.float32(0.5)
                worker.log("rank", environment.rank)
                worker.step(loss=1.0)
                while worker.ended is None and sum(isinstance(m, ff.Update) for m in heard) < worker.steps:
                    worker.serve()
                    time.sleep(0.001)
    print(environment.rank, environment.world, environment.host, params[0].tobytes().hex())
""")


def agent(port: int, host: str, *options: str, rank: str = RANK) -> subprocess.Popen[str]:
    command = [*AGENT, f"127.0.0.1:{port}", "--host", host, *options, "--", sys.executable, "-c", rank]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def salt_file(tmp_path):
    file = tmp_path / "salt"
    file.write_text(SALT.hex())
    return ["--salt-file", str(file)]


@pytest.mark.parametrize("admission", ["open", "pre-shared"])
def test_two_agents_form_a_world_and_train(peer_build, salt_file, admission, revision):
    options, more = ([], []) if admission == "open" else (["--pre-shared-salt"], salt_file)
    more = [*more, "--revision", revision]
    if revision == "0.8":
        more += ["--run-id", "a run", "--nccl-version", "2.21.5", "--model-sig", "12" * 32]
    with Stack(
        peer_build(revision), "--join", "--ranks", 3, "--samples", 96, *options, revision=revision
    ) as stack:
        port = stack.controller[1]
        with agent(port, "a", "--devices", "0,1", *more) as first, agent(port, "b", *more) as second:
            results = [process.communicate(timeout=WAIT) for process in (first, second)]
            lines = stack.lines()
        assert [first.returncode, second.returncode] == [Exit.OK, Exit.OK], results
    joined = [line["joined"] for line in lines if "joined" in line]
    assert sorted(len(host["ranks"]) for host in joined) == [1, 2]
    exits = [line["join_msg"]["RankExited"] for line in lines if "join_msg" in line]
    # The crate's controller ends with its last rank, and its process may be gone before the agents' last reports.
    assert {report["code"] for report in exits} <= {0}
    done = {"done": True, "avg_count": 3, "version": 3, "global_step": 9, "last_epoch": 2, "dead": 0}
    assert [line for line in lines if "done" in line] == [done]
    metrics = [line["epoch_metrics"] for line in lines if "epoch_metrics" in line]
    assert [(m["epoch"], m["avg_loss"], m["scalars"]) for m in metrics] == [
        (epoch, 1.0, {"rank": 1.0}) for epoch in range(3)
    ]
    ended = sorted(line for out, _ in results for line in out.splitlines())
    hosts = {rank: host["host"] for host in joined for rank in host["ranks"]}
    bits = bytes.fromhex("00002040") * 20  # 2.5: the mean of 0, 1, 2 and three gains of 0.5
    assert ended == [f"[rank {rank}] {rank} 3 {hosts[rank]} {bits.hex()}" for rank in range(3)]


@pytest.mark.parametrize("has_salt", [True, False])
def test_wrong_salt(peer_binary, tmp_path, has_salt):
    file = tmp_path / "wrong"
    file.write_text("ff" * 16)
    with Stack(peer_binary, "--join", "--ranks", 1, "--pre-shared-salt") as stack:
        port = stack.controller[1]
        with agent(port, "a", *(["--salt-file", str(file)] if has_salt else [])) as process:
            _, err = process.communicate(timeout=WAIT)
        assert process.returncode == Exit.REFUSED
        assert "refused without a word" in err
        assert "the session salt is wrong, this host uses " in err


def test_refusals_with_a_reason(peer_binary):
    with Stack(peer_binary, "--join", "--ranks", 2) as stack, agent(stack.controller[1], "twin", rank="") as first:
        port = stack.controller[1]
        while "admitted" not in first.stderr.readline():
            pass
        with agent(port, "twin") as second:
            _, err = second.communicate(timeout=WAIT)
        assert second.returncode == Exit.REFUSED
        assert 'refused: host "twin" already joined' in err
        with agent(port, "other", "--dataset-sig", "11" * 32) as third:
            _, err = third.communicate(timeout=WAIT)
        assert third.returncode == Exit.REFUSED
        assert "refused: dataset signature mismatch" in err
        first.kill()


def test_refusals_of_what_0_8_compares(peer_build):
    host = ["--revision", "0.8", "--run-id", "first", "--model-sig", "11" * 32]
    with Stack(peer_build("0.8"), "--join", "--ranks", 2, revision="0.8") as stack:
        port = stack.controller[1]
        with agent(port, "a", *host, rank="") as first:
            while "admitted" not in first.stderr.readline():
                pass
            for change, error in (
                (["--run-id", "second"], "refused: run identity mismatch"),
                (["--model-sig", "22" * 32], "refused: model mismatch"),
            ):
                with agent(port, "b", *host, *change) as other:
                    _, err = other.communicate(timeout=WAIT)
                assert (other.returncode, error in err) == (Exit.REFUSED, True), err
            first.kill()


@pytest.mark.parametrize(("window", "host"), [("0.6", "0.8"), ("0.8", "0.7")])
def test_a_host_of_another_revision_is_refused(peer_build, window, host):
    with Stack(peer_build(window), "--join", "--ranks", 1, revision=window) as stack:
        with agent(stack.controller[1], "a", "--revision", host) as process:
            _, err = process.communicate(timeout=WAIT)
        assert process.returncode == Exit.REFUSED
        assert f"or the controller speaks another revision than {host}" in err


def test_exit_codes_reach_the_controller(peer_binary):
    fail = "import os; raise SystemExit(3 if os.environ['FLODL_INTERNAL_LOCAL_RANK'] == '0' else 0)"
    command = [peer_binary, "stack", "--join", "--ranks", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as stack:
        port = json.loads(stack.stdout.readline())["controller"]
        with agent(port, "a", "--devices", "0,1", rank=fail) as process:
            _, err = process.communicate(timeout=WAIT)
        assert process.returncode == Exit.RANK_FAILED
        assert "rank 0 ended with code 3" in err
        joined, *reports = (json.loads(stack.stdout.readline()) for _ in range(3))
        stack.kill()
    assert joined == {"joined": {"host": "a", "ranks": [0, 1]}}
    reports = [report["join_msg"]["RankExited"] for report in reports]
    assert sorted((report["rank"], report["code"]) for report in reports) == [(0, 3), (1, 0)]


def test_a_killed_controller_ends_the_ranks(peer_binary):
    rank = RANK.replace("worker.step(", "print('a step'); worker.step(")
    with (
        Stack(peer_binary, "--join", "--ranks", 2, "--epochs", 10**6) as stack,
        agent(stack.controller[1], "a", "--devices", "0,1", rank=rank) as process,
    ):
        assert process.stdout.readline().endswith("] a step\n")
        stack.process.kill()
        _, err = process.communicate(timeout=WAIT)
    assert process.returncode == Exit.LOST, err
    assert "the controller is gone: " in err
    assert "rank 0 ended with code 1" in err
    assert "rank 1 ended with code 1" in err

"""A rank's life against a coordinator that follows a script: every message it sends and all that it does."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import reference as ref
from conftest import SALT
from worker_support import CODEC, WAIT, Coordinator, Running, ask_for_an_average, named, stepped, until

import flodl_fast as ff
from flodl_fast import worker as module
from flodl_fast.convert import ShutdownWithSave
from flodl_fast.environment import Environment
from flodl_fast.model import BLOCK, norm
from flodl_fast.net import Deadlines
from flodl_fast.protocol import Revision
from flodl_fast.rounds import Elided
from flodl_fast.worker import Worker

f32 = np.float32
DOCS = Path(__file__).resolve().parents[1] / "docs" / "worker.md"


@pytest.fixture
def params():
    return [np.array([[1, 2], [3, 4]], f32), np.array([5, 6, 7], f32)]


def train(worker, batch_size=4, **report):
    """The plain loop, without any training; what it was given."""
    seen = []
    for plan in worker.plans():
        for picks in plan.batches(batch_size):
            seen.append((plan.epoch, picks.tolist()))
            worker.step(0.5, **report)
    return seen


def control_frame(*values):
    return ff.RoundFrame([np.array(values, f32)], ff.RoundKind.CONTROL)


def model_frame(arrays, weight):
    return ff.RoundFrame([a * f32(weight) for a in arrays], ff.RoundKind.MODEL, weight)


def fail(*_):
    raise OSError("disk full")


def copies(arrays):
    return [array.copy() for array in arrays]


def all_equal(arrays, others):
    return all(a.tobytes() == np.asarray(b, f32).tobytes() for a, b in zip(arrays, others, strict=True))


# ------------------------------------------------------------------------------------------------------- environment


def envelope(**changes):
    value = {
        "controller": {"host": "10.0.0.9", "port": 4000}, "world_size": 4, "num_workers": 2, "salt": SALT.hex(),
        "worker": {"host": "node", "ranks": [2, 3], "local_devices": [5, 6], "nccl_socket_ifname": "", "path": "/p"},
    }
    for path, change in changes.items():
        *parents, name = path.split("__")
        inner = value
        for parent in parents:
            inner = inner[parent]
        if change is None:
            del inner[name]
        else:
            inner[name] = change
    return value


def environ(value=None, **more):
    text = json.dumps(envelope() if value is None else value).encode().hex()
    base = {"FLODL_INTERNAL_CLUSTER_JSON": text, "FLODL_INTERNAL_LOCAL_RANK": "1", "FLODL_HOST_NAME": "node"}
    return {name: text for name, text in {**base, **more}.items() if text is not None}


def test_environment_of_a_rank_behind_a_relay():
    env = Environment.read(environ())
    assert (env.rank, env.world, env.host, env.salt) == (3, 4, "node", SALT)
    assert (env.data, env.control) == (("127.0.0.1", 4004), ("127.0.0.1", 4005))
    assert (env.device, env.direct) == (6, False)
    assert SALT.hex() not in repr(env)
    assert repr(SALT) not in repr(env)


def test_environment_of_a_direct_rank():
    env = Environment.read(environ(FLODL_FAST_ROUTE="direct"))
    assert env.data == env.control == ("10.0.0.9", 4000)
    assert env.direct


@pytest.mark.parametrize(
    ("value", "salt"),
    [(envelope(salt=None), bytes(16)), (envelope(salt=f" {SALT.hex().upper()}\n"), SALT)],
    ids=["absent", "upper case and spaces"],
)
def test_environment_salt(value, salt):
    assert Environment.read(environ(value)).salt == salt


@pytest.mark.parametrize(
    ("devices", "pin", "device"),
    [([5, 6], None, 6), ("all", None, 1), ([5, 6], "6", 0), ([5, 6], "5,6", 6), ([5, 6], "", 6)],
)
def test_environment_device(devices, pin, device):
    value = envelope(worker__local_devices=devices)
    assert Environment.read(environ(value, CUDA_VISIBLE_DEVICES=pin)).device == device


def test_environment_of_later_revisions():
    env = Environment.read(environ())
    assert (env.revision, env.rank_resources, env.data_path, env.gpu_ram_share) == (Revision.V0_6, False, None, None)
    value = envelope(rank_resources=True, worker__data_path="/mnt/corpus", worker__gpu_ram_share=0.5)
    env = Environment.read(environ(value, FLODL_FAST_REVISION="0.8"))
    assert (env.revision, env.rank_resources) == (Revision.V0_8, True)
    assert (env.data_path, env.gpu_ram_share) == ("/mnt/corpus", 0.5)


def test_environment_takes_the_name_of_the_machine():
    value = envelope(worker__host=socket.gethostname())
    assert Environment.read(environ(value, FLODL_HOST_NAME=None)).host == socket.gethostname()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (envelope(controller=None), "controller is missing"),
        (envelope(controller="x"), "controller must be a JSON object"),
        (envelope(controller__host=" "), "controller: host must be text, got ' '"),
        (envelope(controller__port=65531), "port must be a number from 1 to 65530, got 65531"),
        (envelope(controller__port=True), "port must be a number"),
        (envelope(world_size=0), "world_size must be a number from 1"),
        (envelope(num_workers=5), "num_workers must be a number from 1 to 4, got 5"),
        (envelope(worker__ranks=[]), "ranks must be a list of numbers"),
        (envelope(worker__ranks=[2, 4]), "ranks must be a number from 0 to 3, got 4"),
        (envelope(worker__local_devices=[1]), "2 ranks but 1 local_devices"),
        (envelope(worker__local_devices=None), "local_devices is missing"),
        (envelope(worker__host="other"), "is for host 'other', this is 'node'"),
        (envelope(salt="ab" * 15), "FLODL_INTERNAL_CLUSTER_JSON: a salt as text is 32 hex digits"),
        (envelope(salt=7), "salt must be text"),
        (envelope(rank_resources=1), "rank_resources must be true or false, got 1"),
        (envelope(worker__data_path=1), "data_path must be text, got 1"),
        (envelope(worker__gpu_ram_share="half"), "gpu_ram_share must be a number that is not negative, got 'half'"),
        (envelope(worker__gpu_ram_share=-0.5), "gpu_ram_share must be a number that is not negative, got -0.5"),
        ([], "must be a JSON object"),
    ],
)
def test_environment_refuses_an_envelope(value, error):
    with pytest.raises(ValueError, match=re.escape(error)) as caught:
        Environment.read(environ(value))
    assert SALT.hex() not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"FLODL_INTERNAL_CLUSTER_JSON": None}, "FLODL_INTERNAL_CLUSTER_JSON is not set: a flodl launcher or"),
        ({"FLODL_INTERNAL_CLUSTER_JSON": "7b7d7"}, "is not the hex of a JSON object"),
        ({"FLODL_INTERNAL_CLUSTER_JSON": "7b"}, "is not the hex of a JSON object"),
        ({"FLODL_INTERNAL_CLUSTER_JSON": "ff"}, "is not the hex of a JSON object"),
        ({"FLODL_INTERNAL_CLUSTER_JSON": "5b" * 200_000}, "is not the hex of a JSON object (RecursionError in"),
        ({"FLODL_INTERNAL_LOCAL_RANK": None}, "FLODL_INTERNAL_LOCAL_RANK is not set"),
        ({"FLODL_INTERNAL_LOCAL_RANK": None}, "starts one with LocalCluster.environment(rank)"),
        ({"FLODL_INTERNAL_LOCAL_RANK": "2"}, "FLODL_INTERNAL_LOCAL_RANK must be from 0 to 1"),
        ({"FLODL_INTERNAL_LOCAL_RANK": "-1"}, "got '-1'"),
        ({"FLODL_INTERNAL_FULL_CLUSTER_JSON": "00"}, "FLODL_INTERNAL_FULL_CLUSTER_JSON is set beside"),
        ({"FLODL_INTERNAL_RELAY_JSON": "00"}, "FLODL_INTERNAL_RELAY_JSON is set beside"),
        ({"FLODL_INTERNAL_AGENT_JSON": "00"}, "FLODL_INTERNAL_AGENT_JSON is set beside"),
        ({"FLODL_FAST_ROUTE": "tunnel"}, 'FLODL_FAST_ROUTE must be "relay" or "direct", got \'tunnel\''),
        ({"FLODL_FAST_REVISION": "0.9"}, "FLODL_FAST_REVISION: flodl revision '0.9' is not supported"),
    ],
)
def test_environment_refuses(changes, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        Environment.read(environ(**changes))


def test_the_documents_loop_trains_a_rank_of_the_environment(coordinator, monkeypatch, capsys):
    """The first example of docs/worker.md as it stands there, dialling directly; it is 15 lines of Python."""
    example = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 15
    host, port = coordinator.address
    value = envelope(controller={"host": host, "port": port}, world_size=1, num_workers=1, worker__ranks=[0])
    value["worker"]["local_devices"] = "all"
    for name, text in environ(value, FLODL_INTERNAL_LOCAL_RANK="0", FLODL_FAST_ROUTE="direct").items():
        monkeypatch.setenv(name, text)
    done = Running(exec, example, {})
    coordinator.data = coordinator.accept()
    assert coordinator.data.host == "node/0"
    coordinator.data.send(coordinator.data.recv(WAIT))
    coordinator.control = coordinator.accept()
    for epoch in range(4):
        coordinator.plan(epoch, 0, 1024)
        losses = [coordinator.receive().batch_loss for _ in range(32)]
        assert coordinator.receive().avg_loss == pytest.approx(np.mean(losses))
    coordinator.send(ff.Shutdown())
    assert coordinator.receive() == ff.Exiting(0)
    done.result()
    assert capsys.readouterr().out == "[1. 2. 3. 4. 5. 6. 7. 8.]\n"


# ----------------------------------------------------------------------------------------------------------- arrays


class Tensor:
    """As PyTorch's: it gives its array only once it is taken out of the graph."""

    def __init__(self, array):
        self.array = array

    def detach(self):
        return Detached(self.array)

    def data_ptr(self):
        return self.array.ctypes.data


class Detached:
    def __init__(self, array):
        self.array = array

    def numpy(self):
        return self.array


class Exporter:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


OLD_DLPACK = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="before NumPy 2.1 what comes by DLPack is read-only"
)


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(lambda a: a, id="array"),
        pytest.param(Tensor, id="tensor"),
        pytest.param(Exporter, id="dlpack", marks=OLD_DLPACK),
        pytest.param(memoryview, id="memoryview"),
        pytest.param(lambda a: a.T, id="transposed"),
        pytest.param(lambda a: a[::-1, ::-1], id="backwards"),
    ],
)
def test_averages_are_written_into_the_callers_memory(coordinator, share):
    array = np.arange(6, dtype=f32).reshape(2, 3)
    with coordinator.serving([share(array)], world=2) as worker:
        theirs = np.ones(worker.params[0].shape, f32)
        ask_for_an_average(coordinator, worker, [[control_frame(0, 1)], [model_frame([theirs], 1.0)]])
    assert array.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ([np.zeros(2)], "expected float32, got float64"),
        ([np.zeros(2, ml_dtypes.bfloat16)], "params: tensor 0: expected float32, got bfloat16"),
        ([np.zeros(2, f32), np.frombuffer(bytes(8), f32)], "params: tensor 1 is read-only"),
        ([[1.0, 2.0]], "tensor 0: list gives no memory"),
        ({"a": np.zeros(2, f32), "b": np.zeros(2)}, "params: tensor 1 ('b'): expected float32, got float64"),
        ({"a": np.frombuffer(bytes(8), f32)}, "params: tensor 0 ('a') is read-only"),
        (np.zeros(2, f32), "params: expected several tensors, got one ndarray: give a mapping"),
    ],
)
def test_arrays_that_cannot_be_averaged(arrays, error):
    with pytest.raises(TypeError, match=re.escape(error)):
        Worker(arrays, rank=0, world=1, codec=CODEC, data=("127.0.0.1", 1), control=("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"params": []}, "at least one parameter"), ({"rank": 3}, "rank 3"), ({"alpha": 0.0}, "alpha must be above 0")],
)
def test_a_worker_that_cannot_be(changes, error):
    nowhere = ("127.0.0.1", 1)
    options = {"params": [np.zeros(1, f32)], "rank": 0, "world": 3, "codec": CODEC, "data": nowhere, "control": nowhere}
    with pytest.raises(ValueError, match=error):
        Worker(**{**options, **changes})


def test_a_failed_control_handshake_closes_the_data_channel(coordinator, params):
    made = Running(
        Worker, params, rank=0, world=1, codec=CODEC, data=coordinator.address, control=coordinator.address,
        host="here", formation=False,
    )
    data = coordinator.accept()
    coordinator.listener.accept()[0].close()
    with pytest.raises(ff.HandshakeError):
        made.result()
    with pytest.raises(ff.ChannelClosed):
        data.recv(WAIT)


# -------------------------------------------------------------------------------------------------------- formation


@pytest.mark.parametrize("rank", [0, 1])
def test_formation(coordinator, params, rank):
    """Rank 0 sends its values and the others zeros, parameters before buffers; all take what comes back."""
    buffers = [np.array([8, 9], f32)]
    coordinator.world = 2
    made = Running(
        Worker, params, rank=rank, world=2, codec=CODEC, data=coordinator.address, control=coordinator.address,
        host="here", buffers=buffers,
    )
    before = copies(params), copies(buffers)
    data = coordinator.accept()
    replies = [np.full((2, 2), 10, f32), np.full(3, 20, f32)], [np.full(2, 30, f32)]
    for own, reply in zip(before, replies, strict=True):
        frame = data.recv(WAIT)
        assert (frame.kind, frame.weight) == (ff.RoundKind.CONTROL, 0.0)
        assert all_equal(frame.tensors, own if rank == 0 else [np.zeros_like(a) for a in own])
        data.send(ff.RoundFrame(reply, ff.RoundKind.CONTROL))
    coordinator.accept()
    made.result().close()
    assert all_equal(params, [np.full((2, 2), 10), np.full(3, 20)])
    assert buffers[0].tolist() == [30, 30]


# ------------------------------------------------------------------------------------------------------------ plans


def test_what_a_plain_loop_sends(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.plan(3, 100, 9)
        done = Running(train, worker, batch_ms=2.0, data_ms=0.5, lr=0.1)
        assert [coordinator.receive() for _ in range(4)] == [
            ff.Batch(0, 2.0, 0.5, 1, None, 0.5),
            ff.LrUpdate(0, 0.1),
            ff.Batch(0, 2.0, 0.5, 2, None, 0.5),
            ff.LrUpdate(0, 0.1),
        ]
        metrics = coordinator.receive()
        assert metrics.epoch_ms >= 0
        metrics.epoch_ms = 0.0
        assert metrics == ff.MetricsMsg(
            0, 3, avg_loss=0.5, batches_processed=2, samples_processed=8,
            share_complete_ms=5.0, compute_only_ms=4.0, data_starve_ms=1.0,
        )
        coordinator.send(ff.Shutdown())
        assert done.result() == [(3, [100, 101, 102, 103]), (3, [104, 105, 106, 107])]


def test_compute_time_is_measured_where_it_is_not_given(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 4)
        done = Running(train, worker)
        batch = coordinator.receive()
        assert batch.batch_ms >= 0
        assert batch.data_ms == 0
        coordinator.send(ff.Shutdown())
        done.result()


def test_an_empty_plan_is_reported_with_zeros(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.plan(1, 7, 3)
        done = Running(train, worker)
        metrics = coordinator.receive()
        assert (metrics.epoch, metrics.batches_processed, metrics.samples_processed) == (1, 0, 0)
        assert (metrics.avg_loss, metrics.compute_only_ms, metrics.scalars) == (0.0, 0.0, {})
        coordinator.send(ff.Shutdown())
        assert done.result() == []


def test_plans_are_queued(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 4)
        coordinator.plan(0, 4, 4)
        coordinator.send(ff.Update(1, ff.EpochPlan(1, 8, 4)))
        done = Running(train, worker)
        reports = [m for m in (coordinator.receive() for _ in range(6)) if isinstance(m, ff.MetricsMsg)]
        assert [(m.epoch, m.samples_processed) for m in reports] == [(0, 4), (0, 4), (1, 4)]
        coordinator.send(ff.Shutdown())
        assert done.result() == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [8, 9, 10, 11])]


def test_an_appended_slice_grows_the_plan(coordinator, params):
    """What is left of the first slice and the appended one make a batch, as in the crate's list of picks."""
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 6)
        plans = worker.plans()
        plan = next(plans)
        batches = plan.batches(4)
        assert next(batches).tolist() == [0, 1, 2, 3]
        coordinator.send(ff.ExtendPartition(50, 7))
        until(lambda: worker.serve() or plan.size == 13)
        worker.step(0.0)
        rest = []
        for picks in batches:
            rest.append(picks.tolist())
            worker.step(0.0)
        assert rest == [[4, 5, 50, 51], [52, 53, 54, 55]]
        coordinator.send(ff.Shutdown())
        assert next(plans, None) is None
        assert [coordinator.receive().step_count for _ in range(3)] == [1, 2, 3]
        assert coordinator.receive().samples_processed == 12


def test_a_slice_that_comes_before_a_throttled_rank_begins_its_plan(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.send(ff.Throttle(), ff.StartEpoch(ff.EpochPlan(0, 0, 4)), ff.ExtendPartition(50, 8), ff.Update(1))
        assert next(worker.plans()).slices == [(0, 4), (50, 8)]


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (lambda plan: list(plan.batches(8)), "of a plan of 16 samples: no step() for any of its batches"),
        (lambda plan: list(plan.batches(17)), "of a plan of 16 samples: no full batch of 17"),
        (lambda plan: None, "of a plan of 16 samples: no batch taken"),
    ],
)
def test_a_plan_of_which_nothing_was_trained_is_spoken_of_once(coordinator, params, caplog, loop, said):
    with coordinator.serving(params) as worker:
        for epoch in range(2):
            coordinator.plan(epoch, 0, 16)
        coordinator.send(ff.Shutdown())
        for plan in worker.plans():
            loop(plan)
    assert caplog.text.count("rank 0: nothing was trained " + said) == 1


def test_a_plan_of_which_something_was_trained_is_not_spoken_of(coordinator, params, caplog):
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 12)
        coordinator.plan(1, 0, 12)
        coordinator.send(ff.Shutdown())
        for plan in worker.plans():
            for _ in plan.batches(8):
                worker.step(0.5)
    assert "nothing was trained" not in caplog.text


def test_a_slice_that_comes_after_the_plan_is_dropped_loudly(coordinator, params, caplog):
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 4)
        done = Running(train, worker)
        assert isinstance(coordinator.receive(), ff.Batch)
        assert isinstance(coordinator.receive(), ff.MetricsMsg)
        coordinator.send(ff.ExtendPartition(50, 8))
        coordinator.plan(1, 0, 4)
        assert isinstance(coordinator.receive(), ff.Batch)
        assert coordinator.receive().samples_processed == 4
        coordinator.send(ff.Shutdown())
        assert [epoch for epoch, _ in done.result()] == [0, 1]
    assert "rank 0: dropped 8 samples of a dead rank" in caplog.text


def test_scalars_are_summed_and_counted_from_report_to_report(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 4)
        coordinator.plan(0, 4, 4)

        def loop():
            for plan in worker.plans():
                for _ in plan.batches(4):
                    worker.log("seen", np.float64(2.5))
                    worker.log("seen", 3)
                    worker.log(f"plan at {plan.slices[0][0]}", 1)
                    worker.step(np.float32(0.25))

        done = Running(loop)
        reports = [m for m in (coordinator.receive() for _ in range(4)) if isinstance(m, ff.MetricsMsg)]
        assert [m.scalars for m in reports] == [
            {"seen": (5.5, 2), "plan at 0": (1.0, 1)},
            {"seen": (5.5, 2), "plan at 4": (1.0, 1)},
        ]
        coordinator.send(ff.Shutdown())
        done.result()


def test_resources_ride_in_reports(coordinator, params):
    sample = ff.ResourceSample(cpu_percent=12.5, ram_used_bytes=7)
    with coordinator.serving(params, resources=lambda: sample) as worker:
        coordinator.plan(0, 0, 0)
        done = Running(train, worker)
        assert coordinator.receive().resources == sample
        coordinator.send(ff.Shutdown())
        done.result()


@pytest.mark.parametrize("asked", [True, False])
def test_samples_of_resources_between_reports(params, revision, asked, monkeypatch):
    """From 0.7 on, where the controller asks for them, and seldom."""
    calls = iter(range(100))
    clock = iter([100.0, 100.4, 100.4, 100.6, 101.0, 101.2, 101.2, 101.3])  # read before a sample, and at one
    coordinator = Coordinator(revision)
    options = {"resources": lambda: ff.ResourceSample(ram_used_bytes=next(calls)), "sample_resources": asked}
    with coordinator.serving(named(params), **options) as worker:
        coordinator.plan(0, 0, 5)
        plan = next(worker.plans())
        times = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", times)
        for _ in plan.batches(1):
            worker.step(0.5)
        monkeypatch.undo()
        coordinator.send(ff.Shutdown())
        assert list(worker.plans()) == []
        told = [coordinator.receive() for _ in range(7 if asked and revision != "0.6" else 5)]
        assert isinstance(told[-1], ff.Batch)
    coordinator.close()
    samples = [(i, m.sample.ram_used_bytes) for i, m in enumerate(told) if isinstance(m, ff.TimingResourceSample)]
    assert samples == ([(1, 0), (5, 1)] if asked and revision != "0.6" else [])


def test_a_failing_sample_of_resources_ends_the_rank(params):
    coordinator = Coordinator("0.7")
    with coordinator.serving(params, resources=fail, sample_resources=True) as worker:
        coordinator.plan(0, 0, 1)
        plan = next(worker.plans())
        for _ in plan.batches(1):
            with pytest.raises(OSError, match="disk full"):
                worker.step(0.5)
        assert isinstance(worker.ended, OSError)
        assert worker.steps == coordinator.receive().step_count == 1
    coordinator.close()


def test_steps_that_are_not_a_plans(coordinator, params):
    with coordinator.serving(params) as worker:
        with pytest.raises(RuntimeError, match="none is being trained"):
            worker.step(0.5)
        coordinator.plan(0, 0, 8)
        plan = next(worker.plans())
        with pytest.raises(RuntimeError, match="needs samples="):
            worker.step(0.5)
        with pytest.raises(TypeError, match=r"^loss: expected one number, got NoneType: "):
            worker.step(None, samples=8)
        with pytest.raises(TypeError, match=r"^loss: expected one number, got ndarray: "):
            worker.step(np.zeros(3), samples=8)
        with pytest.raises(ValueError, match=r"^loss: expected one number, got str: "):
            worker.step("low", samples=8)
        with pytest.raises(TypeError, match=r"^lr: expected one number, got list: "):
            worker.step(0.5, samples=8, lr=[])
        assert worker.step(0.5, samples=8)
        with pytest.raises(ValueError, match="batch_size must be positive, got 0"):
            plan.batches(0)
        assert worker.steps == 1
        assert coordinator.receive().step_count == 1


# ---------------------------------------------------------------------------------------------------- the average


def test_the_average_is_the_crates(coordinator, params):
    """Count round, parameters times their mass, buffers times the mover mass; the ack with distance and norms."""
    buffers = [np.array([1, 3], f32)]
    theirs, their_buffers = [np.full((2, 2), 0.1, f32), np.full(3, -0.3, f32)], [np.array([5, 7], f32)]
    before = copies(params)
    with coordinator.serving(params, world=2, buffers=buffers) as worker:
        stepped(coordinator, worker, 3)
        ack, sent = ask_for_an_average(
            coordinator, worker,
            [[control_frame(0, 2)], [model_frame(theirs, 2.0)], [model_frame(their_buffers, 1.0)]],
        )
    counts, mine, my_buffers = sent
    assert (counts.kind, counts.weight, counts.tensors[0].tolist()) == (ff.RoundKind.CONTROL, 0.0, [3, 0])
    assert (mine.kind, mine.weight) == (ff.RoundKind.MODEL, 3.0)
    assert all_equal(mine.tensors, [a * f32(3) for a in before])
    assert (my_buffers.weight, my_buffers.tensors[0].tolist()) == (1.0, [1, 3])
    average = [(a * f32(3) + b * f32(2)) * f32(1 / 5) for a, b in zip(before, theirs, strict=True)]
    assert all_equal(params, average)
    assert buffers[0].tolist() == [3, 5]
    flat = [np.concatenate([a.ravel() for a in arrays]).astype(np.float64) for arrays in (before, average)]
    assert ack.step_count == 0
    assert ack.pre_norm == pytest.approx(np.linalg.norm(flat[0]), rel=1e-6)
    assert ack.post_norm == pytest.approx(np.linalg.norm(flat[1]), rel=1e-6)
    assert ack.divergence == pytest.approx(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]), rel=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_that_no_step_changes_are_spoken_of_once(coordinator, params, caplog, in_place):
    """As where a loop rebinds its own names, `w = w - ...`, and the arrays that are averaged stay as they were."""
    with coordinator.serving(params, world=2) as worker:
        theirs = [np.ones((2, 2), f32), np.ones(3, f32)]
        coordinator.plan(0, 0, 6)
        batches = next(worker.plans()).batches(1)
        for steps in (2, 0, 3, 1):
            for _ in itertools.islice(batches, steps):
                worker.step(0.5)
                coordinator.receive()
            if in_place:
                params[0] += f32(0.5)
            ask_for_an_average(coordinator, worker, [[control_frame(0, 1)], [model_frame(theirs, 1.0)]])
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if in_place else [
        "rank 0: 3 steps have left the parameters as the average before made them: "
        "are the Worker's own arrays trained, in place?"
    ])


@pytest.mark.parametrize(("gamma", "mass"), [(1.0, 4.0), (0.5, 2.0), (0.0, 1.0), (-1.0, 0.25)])
def test_the_exponent_of_work(coordinator, params, gamma, mass):
    before = copies(params)
    with coordinator.serving(params, world=2, gamma=gamma) as worker:
        stepped(coordinator, worker, 4)
        _, (_, sent) = ask_for_an_average(coordinator, worker, [[control_frame(0, 1)], [model_frame(before, 1.0)]])
    assert sent.weight == mass
    assert all_equal(sent.tensors, [a * f32(mass) for a in before])


def test_an_idle_cohort_makes_no_further_round(coordinator, params):
    before = copies(params)
    with coordinator.serving(params, buffers=[np.ones(1, f32)]) as worker:
        ack, sent = ask_for_an_average(coordinator, worker, [[]])
    assert len(sent) == 1
    assert (ack.divergence, ack.pre_norm, ack.post_norm) == (0.0, ack.post_norm, pytest.approx(math.sqrt(140)))
    assert all_equal(params, before)


def test_an_idle_rank_joins_and_takes_the_others_average(coordinator, params):
    buffers = [np.ones(1, f32)]
    theirs, their_buffers = [np.full((2, 2), 2, f32), np.full(3, 4, f32)], [np.full(1, 9, f32)]
    with coordinator.serving(params, world=2, buffers=buffers) as worker:
        _, sent = ask_for_an_average(
            coordinator, worker,
            [[control_frame(0, 5)], [model_frame(theirs, 5.0)], [model_frame(their_buffers, 1.0)]],
        )
    assert [frame.weight for frame in sent[1:]] == [0.0, 0.0]
    assert not any(tensor.any() for frame in sent[1:] for tensor in frame.tensors)
    assert all_equal(params, theirs)
    assert buffers[0].tolist() == [9]


def test_a_reply_without_mass_keeps_the_local_state(coordinator, params):
    """The counts have moved but the frames weigh nothing, as where the ranks that trained have died since."""
    before = copies(params)
    with coordinator.serving(params, world=2) as worker:
        ack, _ = ask_for_an_average(coordinator, worker, [[control_frame(0, 5)], [model_frame(before, 0.0)]])
    assert all_equal(params, before)
    assert (ack.divergence, ack.pre_norm) == (0.0, ack.post_norm)


def test_parameters_near_zero_do_not_diverge(coordinator):
    params = [np.full(4, 1e-3, f32)]
    with coordinator.serving(params, world=2) as worker:
        ack, _ = ask_for_an_average(
            coordinator, worker, [[control_frame(0, 1)], [model_frame([np.full(4, 1e-11, f32)], 1.0)]]
        )
    assert ack.divergence == 0.0
    assert ack.post_norm == pytest.approx(2e-11)


def test_an_elastic_blend_goes_part_of_the_way(coordinator):
    params, buffers = [np.array([4, 8], f32)], [np.array([2], f32)]
    with coordinator.serving(params, world=2, buffers=buffers, alpha=0.25) as worker:
        ack, _ = ask_for_an_average(
            coordinator, worker,
            [[control_frame(0, 1)], *([model_frame([np.array(a, f32)], 1.0)] for a in ([8, 16], [6]))],
        )
    assert params[0].tolist() == [5, 10]
    assert buffers[0].tolist() == [6]
    assert ack.divergence == pytest.approx(0.5)


def test_work_counts_from_average_to_average(coordinator, params):
    with coordinator.serving(params) as worker:
        assert [batch.step_count for batch in stepped(coordinator, worker, 2)] == [1, 2]
        _, sent = ask_for_an_average(coordinator, worker, [[], []])
        assert sent[0].tensors[0].tolist() == [2]
        for worked in (3, 1):
            coordinator.plan(1, 0, worked)
            for _ in next(worker.plans()).batches(1):
                worker.step(0.5)
            while not (isinstance(message := coordinator.receive(), ff.Batch) and message.step_count == worker.steps):
                pass
            _, sent = ask_for_an_average(coordinator, worker, [[], []])
            assert sent[0].tensors[0].tolist() == [worked]


def test_the_norm_comes_with_every_tenth_step_since_an_average(coordinator, params):
    with coordinator.serving(params) as worker:
        norms = [batch.param_norm for batch in stepped(coordinator, worker, 21)]
    assert norms[9] == norms[19] == pytest.approx(math.sqrt(140))
    assert [i for i, found in enumerate(norms, 1) if found is not None] == [10, 20]


def test_norms_of_many_blocks_and_strides():
    rng = np.random.default_rng(0)
    big = rng.standard_normal(BLOCK * 2 + 17).astype(f32)
    arrays = (big, rng.standard_normal((5, 7)).astype(f32).T, np.float32(3.0).reshape(()), np.empty((0, 2), f32))
    others = tuple(np.ascontiguousarray(a * f32(0.5)) for a in arrays)
    expected = math.sqrt(sum(float(np.sum(a.astype(np.float64) ** 2)) for a in arrays))
    assert norm(arrays) == pytest.approx(expected, rel=1e-6)
    assert norm(arrays, others) == pytest.approx(expected / 2, rel=1e-6)


def test_the_base_of_a_schedule(coordinator, params):
    with coordinator.serving(params) as worker:
        assert worker.global_step == 0
        stepped(coordinator, worker, 2)
        assert worker.global_step == 2
        coordinator.send(ff.SetGlobalStep(70000))
        until(lambda: worker.serve() or worker.global_step == 70002)
        ask_for_an_average(coordinator, worker, [[], []])
        assert worker.global_step == 70000


# --------------------------------------------------------------------------------------------------------- throttle


@pytest.mark.parametrize("release", [ff.Update(1), ff.Shutdown(), ff.ShutdownWithSave(0)])
def test_a_throttled_rank_averages_but_does_not_step(coordinator, params, release):
    """What it does while throttled is seen when the release is the first thing that lets a batch through."""
    with coordinator.serving(params, world=2) as worker:
        coordinator.send(ff.Throttle(), ff.Throttle(), ff.RequestParams())
        coordinator.plan(0, 0, 4)
        plans = worker.plans()
        waiting = Running(next, plans, None)
        assert coordinator.receive() == ff.SnapshotReady(0)
        coordinator.round(control_frame(0, 1))
        coordinator.round(model_frame([np.zeros((2, 2), f32), np.zeros(3, f32)], 1.0))
        assert isinstance(coordinator.receive(), ff.SyncAck)
        coordinator.send(ff.SetGlobalStep(9), release)
        plan = waiting.result()
        assert worker.global_step == 9
        assert (plan.epoch if plan else None) == (0 if isinstance(release, ff.Update) else None)


def test_a_step_waits_while_throttled(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 8)
        next(worker.plans())
        coordinator.send(ff.Throttle(), ff.SetGlobalStep(5), ff.Update(1))
        until(lambda: worker.step(0.5, samples=1) and worker.global_step == 5 + worker.steps)
        coordinator.send(ff.Throttle(), ff.Shutdown())
        until(lambda: not worker.step(0.5, samples=1))


# -------------------------------------------------------------------------------------------------------- callbacks


def serve_one(coordinator, worker, message):
    coordinator.send(message)
    done = Running(lambda: [None for _ in worker.plans()])
    answer = coordinator.receive()
    coordinator.send(ff.Shutdown())
    done.result()
    return answer


@pytest.mark.parametrize(
    ("callback", "error"),
    [(lambda version: None, None), (fail, "OSError: disk full"), (None, "this rank has no on_checkpoint")],
)
def test_checkpoint(coordinator, params, callback, error, caplog):
    caplog.set_level(logging.CRITICAL)
    with coordinator.serving(params, on_checkpoint=callback) as worker:
        answer = serve_one(coordinator, worker, ff.Checkpoint(7, 0))
    assert answer.elapsed_ms >= 0
    answer.elapsed_ms = 0.0
    assert answer == ff.CheckpointResult(0, 7, 0.0, error)


@pytest.mark.parametrize(
    ("callback", "metric", "error"),
    [
        (lambda epoch: np.float32(epoch / 8), 0.375, None),
        (fail, math.nan, "OSError: disk full"),
        (lambda epoch: "high", math.nan, "ValueError: could not convert string to float: 'high'"),
        (None, math.nan, "this rank has no on_eval"),
    ],
)
def test_evaluation(coordinator, params, callback, metric, error, caplog):
    caplog.set_level(logging.CRITICAL)
    with coordinator.serving(params, on_eval=callback) as worker:
        answer = serve_one(coordinator, worker, ff.ExecuteEvalCallback(2**64 - 1, 3, 0))
    assert (answer.schedule_id, answer.epoch, answer.error) == (2**64 - 1, 3, error)
    assert answer.metric == pytest.approx(metric, nan_ok=True)


def test_what_is_meant_for_another_rank(coordinator, params):
    calls = []
    heard = calls.append
    callbacks = {"on_checkpoint": heard, "on_eval": heard, "on_consensus_save": lambda: heard(None)}
    with coordinator.serving(params, world=2, **callbacks) as worker:
        coordinator.send(ff.Checkpoint(1, 1), ff.ExecuteEvalCallback(1, 1, 1), ff.SaveConsensusModel(1), ff.Shutdown())
        assert list(worker.plans()) == []
    assert calls == []


def test_the_epoch_callback_runs_once_an_epoch_at_the_rank_of_the_role(coordinator, params):
    epochs = []
    with coordinator.serving(params, world=2, on_epoch=epochs.append) as worker:
        coordinator.send(ff.SetEpochCallbackRole(1))
        coordinator.plan(0, 0, 0)
        coordinator.send(ff.SetEpochCallbackRole(0))
        for epoch in (0, 1, 1, 2):
            coordinator.plan(epoch, 0, 0)
        done = Running(train, worker)
        messages = [coordinator.receive() for _ in range(7)]
        coordinator.send(ff.Shutdown())
        done.result()
    assert epochs == [1, 2]
    assert [(type(m), m.epoch) for m in messages] == [
        (ff.MetricsMsg, 0), (ff.MetricsMsg, 0), (ff.EpochFnElapsed, 1), (ff.MetricsMsg, 1), (ff.MetricsMsg, 1),
        (ff.EpochFnElapsed, 2), (ff.MetricsMsg, 2),
    ]


def test_saves(coordinator, params):
    saves = []
    with coordinator.serving(
        params, on_consensus_save=lambda: saves.append("consensus"), on_shutdown_save=saves.append
    ) as worker:
        coordinator.send(ff.SaveConsensusModel(0), ff.ShutdownWithSave(4))
        assert list(worker.plans()) == []
        assert worker.ended == ShutdownWithSave(ff.SaveReason.REDUCE_STALL)
    assert saves == ["consensus", ff.SaveReason.REDUCE_STALL]
    assert coordinator.receive() == ff.Exiting(0)


def test_what_the_coordinator_tells(coordinator, params):
    told = [
        ff.EpochAggregated(ff.EpochMetrics(0, {"x": 1.5})), ff.EvalBroadcast(1, 0.25),
        ff.StageAdvisory([4], [(0, [(0, 4)])]), ff.CoordHeartbeat(), ff.DeclareDead(3), ff.Shutdown(),
    ]
    seen = []
    with coordinator.serving(params, on_message=seen.append) as worker:
        coordinator.send(*told)
        assert list(worker.plans()) == []
    assert seen == told
    assert worker.epoch_metrics == told[0].metrics
    assert (worker.evaluation, worker.advisory) == (told[1], told[2])


def test_what_a_rank_asks_and_tells(coordinator, params):
    with coordinator.serving(params) as worker:
        worker.request_eval()
        worker.request_checkpoint()
        worker.dashboard(port=8080, svg="<svg/>", label="net", hash="ab", metadata="{}", hardware="one core")
        worker.dashboard(hardware="two cores")
        assert [coordinator.receive() for _ in range(7)] == [
            ff.Intent(0, ff.IntentKind.EVAL_NOW), ff.Intent(0, ff.IntentKind.CHECKPOINT_NOW),
            ff.DashboardRegister(0, 8080), ff.DashboardSetSvg(0, "<svg/>", "net", "ab"),
            ff.DashboardSetMetadata(0, "{}"), ff.DashboardSetHardware(0, "one core"),
            ff.DashboardSetHardware(0, "two cores"),
        ]


# --------------------------------------------------------------------------------------------------------- heartbeat


def test_heartbeats_come_also_during_a_round(coordinator, params, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT", 0.01)
    with coordinator.serving(params) as worker:
        assert coordinator.control.recv(WAIT) == ff.Heartbeat(0, 1)
        coordinator.send(ff.RequestParams(), ff.Shutdown())
        done = Running(train, worker)
        assert coordinator.receive() == ff.SnapshotReady(0)
        beats = [coordinator.control.recv(WAIT) for _ in range(5)]
        first = beats[0].step_count
        assert beats == [ff.Heartbeat(0, first + i) for i in range(5)]
        coordinator.round()
        done.result()


# ------------------------------------------------------------------------------------------------------------ the end


def received_to_the_end(coordinator):
    messages = []
    try:
        while True:
            messages.append(coordinator.receive())
    except ff.ChannelClosed:
        return messages


def test_a_clean_end_says_so_last(coordinator, params):
    with coordinator.serving(params) as worker, worker:
        coordinator.plan(0, 0, 40)
        coordinator.send(ff.Shutdown())
        assert len(train(worker)) == 1  # The plan is left where the run ends, and not reported.
        assert worker.ended == ff.Shutdown()
        assert worker.step(0.5) is False
    assert [type(m) for m in received_to_the_end(coordinator)] == [ff.Batch, ff.Exiting]
    worker.close()


def test_what_follows_a_shutdown_does_not_keep_the_channels_open(coordinator, params):
    with coordinator.serving(params) as worker:
        end = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 0, CODEC.encode(ff.Shutdown())))
        coordinator.control._link.write(end + b"no record is this, though as long")
        assert list(worker.plans()) == []
        worker.close()
        assert worker.ended == ff.Shutdown()
        assert worker._control.closed
        assert worker._data.closed
    assert [type(m) for m in received_to_the_end(coordinator)] == [ff.Exiting]


def test_a_coordinator_that_never_stops_does_not_keep_a_rank_from_its_end(coordinator, params, monkeypatch):
    monkeypatch.setattr(module, "DRAIN", 0.1)
    with coordinator.serving(params) as worker:
        coordinator.send(ff.Shutdown())
        assert list(worker.plans()) == []
        monkeypatch.setattr(worker._control, "recv", lambda _: ff.CoordHeartbeat())
        Running(worker.close).result()
        assert worker._data.closed
    assert [type(m) for m in received_to_the_end(coordinator)] == [ff.Exiting]


def test_a_signal_handler_s_error_at_the_end_closes_both_channels(coordinator, params, monkeypatch):
    with coordinator.serving(params) as worker:
        coordinator.send(ff.Shutdown())
        assert list(worker.plans()) == []

        def interrupted(*_):
            raise TimeoutError("the batch system wants its machine back")

        monkeypatch.setattr(worker._control, "recv", interrupted)
        with pytest.raises(TimeoutError, match="wants its machine back"):
            worker.close()
        assert worker._control.closed
        assert worker._data.closed
    assert [type(m) for m in received_to_the_end(coordinator)] == [ff.Exiting]


def test_what_cannot_be_told_ends_the_rank(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.control.close()

        def ask():
            while True:  # what is sent first may reach the system before the end does
                worker.request_eval()

        with pytest.raises(ff.ChannelClosed) as caught:
            Running(ask).result()
        assert worker.ended is caught.value
        assert worker._data.closed
        assert not worker._heart.is_alive()


def test_an_error_of_the_callers_is_no_clean_end(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.send(ff.Shutdown())

        def train_and_fail():
            with worker:
                assert list(worker.plans()) == []
                fail()

        with pytest.raises(OSError, match="disk full"):
            train_and_fail()
        assert isinstance(worker.ended, OSError)
        assert received_to_the_end(coordinator) == []


def test_leaving_early_is_loud(coordinator, params):
    with coordinator.serving(params) as worker:
        coordinator.plan(0, 0, 4)
        with pytest.raises(RuntimeError, match="rank 0 leaves before the coordinator's Shutdown"), worker:
            next(worker.plans())
        assert received_to_the_end(coordinator) == []


def tampered(message):
    frame = bytearray(CODEC.encode(message))
    frame[-1] ^= 1
    return bytes(frame)


FAULTS = {
    "end of the stream": (lambda c: c.control.close(), ff.ChannelClosed),
    "a flipped bit": (
        lambda c: c.control._link.write(CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 0, tampered(ff.Throttle())))),
        ff.AuthenticationError,
    ),
    "a reserved target": (lambda c: c.send(ff.Checkpoint(1, 2**64 - 1)), ff.ReservedTargetError),
    "another backend": (lambda c: c.send(ff.SyncNow()), ff.ChannelError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unexpected_end(coordinator, params, fault):
    break_it, error = FAULTS[fault]
    before = copies(params)
    with coordinator.serving(params) as worker:
        done = Running(train, worker)
        break_it(coordinator)
        with pytest.raises(error) as caught:
            done.result()
        assert worker.ended is caught.value
        assert worker._control.closed
        assert worker._data.closed
        assert not worker._heart.is_alive()
        with pytest.raises(ff.ChannelClosed, match="rank 0 has ended"):
            next(worker.plans())
        with pytest.raises(ff.ChannelClosed, match="rank 0 has ended"):
            worker.step(0.5)
    assert all_equal(params, before)


def test_a_silent_coordinator(coordinator, params):
    with coordinator.serving(params, deadlines=Deadlines(liveness=0.3)) as worker:
        with pytest.raises(ff.ChannelError, match=r"0\.3") as caught:
            list(worker.plans())
        assert worker.ended is caught.value


def test_a_time_out_of_a_signal_handler_is_not_the_worker_s(coordinator, params, monkeypatch):
    with coordinator.serving(params) as worker:
        mine = TimeoutError("the batch system wants its machine back")

        def interrupted(*_, **__):
            raise mine

        monkeypatch.setattr(worker._control, "recv", interrupted)
        with pytest.raises(TimeoutError, match="wants its machine back"):
            list(worker.plans())
        assert worker.ended is mine


def test_a_failing_callback_ends_the_rank(coordinator, params):
    with coordinator.serving(params, on_shutdown_save=fail) as worker:
        coordinator.send(ff.ShutdownWithSave(0))
        with pytest.raises(OSError, match="disk full"):
            list(worker.plans())
        assert received_to_the_end(coordinator) == []


def test_messages_that_are_no_coordinators_are_dropped(coordinator, params, caplog):
    with coordinator.serving(params) as worker:
        coordinator.control.send(ff.Heartbeat(0, 1))
        coordinator.send(ff.Shutdown())
        assert list(worker.plans()) == []
    assert "rank 0: dropped a Heartbeat" in caplog.text


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (ff.RoundFrame([np.zeros((2, 2), f32), np.zeros(4, f32)], weight=1.0), r"tensor 1: .*\(4,\).*\(3,\)"),
        (ff.RoundFrame([np.zeros((2, 2), f32)], weight=1.0), "1 tensors"),
        (ff.RoundFrame([np.zeros((2, 2), f32), np.zeros(3, f32)], ff.RoundKind.CONTROL, 1.0), "reply is CONTROL"),
    ],
    ids=["shape", "count", "kind"],
)
def test_a_reply_that_does_not_fit(coordinator, params, reply, error):
    before = copies(params)
    with coordinator.serving(params) as worker:
        stepped(coordinator, worker, 1)
        coordinator.send(ff.RequestParams())
        done = Running(train, worker)
        coordinator.round()
        coordinator.data.recv(WAIT)
        coordinator.data.send(reply)
        with pytest.raises(ff.TensorError, match=error):
            done.result()
        assert isinstance(worker.ended, ff.TensorError)
    assert all_equal(params, before)


def test_a_failed_round_of_buffers_leaves_the_parameters(coordinator, params):
    before = copies(params)
    with coordinator.serving(params, world=2, buffers=[np.ones(2, f32)]) as worker:
        coordinator.send(ff.RequestParams())
        done = Running(train, worker)
        coordinator.round(control_frame(0, 1))
        coordinator.round(model_frame([np.zeros((2, 2), f32), np.zeros(3, f32)], 1.0))
        coordinator.data.recv(WAIT)
        coordinator.data.close()
        with pytest.raises(ff.ChannelClosed):
            done.result()
    assert all_equal(params, before)


# -------------------------------------------------------------------------------------------------------- revisions

PARAMS = {"weight": np.zeros((2, 3), f32), "bias": np.zeros(3, f32)}
BUFFERS = {"mean": np.zeros(3, f32), "count": np.zeros((), np.int64)}
SIGNED = [("weight", "float32", [2, 3]), ("bias", "float32", [3])], [("mean", "float32", [3]), ("count", "int64", [])]


@pytest.mark.parametrize(
    ("options", "signature"),
    [
        ({"params": PARAMS}, ref.model_sig(SIGNED[0], [])),
        ({"params": PARAMS, "buffers": BUFFERS}, ref.model_sig(*SIGNED)),
        ({"params": PARAMS, "buffers": BUFFERS, "model_sig": b"\7" * 32}, b"\7" * 32),
        ({"params": [*PARAMS.values()], "model_sig": b"\7" * 32}, b"\7" * 32),
    ],
    ids=["names", "of buffers too", "given beside names", "given alone"],
)
def test_the_signature_that_a_rank_tells(options, signature, revision):
    coordinator = Coordinator(revision)
    with coordinator.serving(**options) as worker:
        assert coordinator.control.model_sigs == ((signature,) if revision == "0.8" else ())
        # Of a mapping of buffers those that are averaged; the others are the model's all the same.
        assert [array.shape for array in worker.buffers] == ([(3,)] if "buffers" in options else [])
        assert all(np.shares_memory(a, b) for a, b in zip(worker.params, PARAMS.values(), strict=True))
    coordinator.close()


@pytest.mark.parametrize(
    "options",
    [
        {"params": [*PARAMS.values()]},
        {"params": [*PARAMS.values()], "buffers": BUFFERS},
        {"params": PARAMS, "buffers": [BUFFERS["mean"]]},
    ],
)
def test_0_8_wants_the_names_of_a_model(options, revision):
    options = {**options, "rank": 0, "world": 1, "codec": ff.Codec(SALT, revision), "formation": False}
    if revision == "0.8":
        with pytest.raises(ValueError, match=r"compares the models .* by their names: .* or give model_sig="):
            Worker(**options, data=("127.0.0.1", 1), control=("127.0.0.1", 1))
        return
    coordinator = Coordinator(revision)
    made = Running(Worker, **options, data=coordinator.address, control=coordinator.address)
    coordinator.accept(), coordinator.accept()
    made.result().close()
    coordinator.close()


def test_a_model_that_has_no_signature(revision):
    """A buffer of bool, as many a module of attention has: only where the signature is told it matters."""
    options = {"params": PARAMS, "buffers": {"mask": np.ones((2, 2), bool)}}
    coordinator = Coordinator(revision)
    if revision == "0.8":
        with pytest.raises(TypeError, match="mask: flodl has no code for dtype bool"):
            Worker(**options, rank=0, world=1, codec=ff.Codec(SALT, revision), data=("127.0.0.1", 1),
                   control=("127.0.0.1", 1))
        options["model_sig"] = b"\7" * 32
    with coordinator.serving(**options) as worker:
        assert worker.buffers == ()
        assert coordinator.control.model_sigs == ((b"\7" * 32,) if revision == "0.8" else ())
    coordinator.close()


def test_bf16_wire_is_not_of_0_6():
    with pytest.raises(ValueError, match=r"revision 0.6 has no bf16_wire, which came with 0.7"):
        Worker(PARAMS, rank=0, world=1, codec=CODEC, data=("127.0.0.1", 1), control=("127.0.0.1", 1), bf16_wire=True)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("wire", [None, "bf16"])
def test_what_a_rank_gives_to_an_average(revision, wire, steps):
    """Rounded where it travels in bf16; and at 0.8 without its zeros where it has not trained."""
    if wire is not None and revision == "0.6":
        pytest.skip("0.6 has no bfloat16")
    coordinator = Coordinator(revision)
    params = {"a": np.array([1.0, 1 / 3, -7.7], f32)}
    buffers = {"b": np.array([1 / 7], f32)}
    before = [params["a"].copy(), buffers["b"].copy()]
    with coordinator.serving(params, world=2, buffers=buffers, bf16_wire=wire == "bf16") as worker:
        if steps:
            stepped(coordinator, worker, steps)
        others = [np.full(3, 2.0, f32), np.full(1, 2.0, f32)]
        if wire:
            others = [array.astype(ml_dtypes.bfloat16) for array in others]
        counts = [ff.RoundFrame([np.array([0, 1], f32)], ff.RoundKind.CONTROL)]
        given = [[ff.RoundFrame([other], ff.RoundKind.MODEL, 1.0)] for other in others]
        _, (count, *sent) = ask_for_an_average(coordinator, worker, [counts, *given])
        assert count.tensors[0].tolist() == [steps, 0]
        for frame, array, mass in zip(sent, before, (steps, min(steps, 1)), strict=True):
            assert frame.weight == mass
            (tensor,) = frame.tensors
            if revision == "0.8" and not steps:
                assert tensor == Elided(array.shape, wire or "f32")
                continue
            dtype = np.dtype(ml_dtypes.bfloat16) if wire else f32
            assert (tensor.dtype, tensor.tobytes()) == (dtype, (array * f32(mass)).astype(dtype).tobytes())
        for array, frame, other in zip((params["a"], buffers["b"]), sent, others, strict=True):
            average = ff.reduce_frames([frame, ff.RoundFrame([other], ff.RoundKind.MODEL, 1.0)]).tensors[0]
            assert array.tolist() == average.astype(f32).tolist()
    coordinator.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_formation_of_each_revision(rank, revision):
    """At 0.8 ranks other than 0 send the shapes alone; all ranks adopt what comes."""
    coordinator = Coordinator(revision)
    coordinator.world = 2
    params = {"a": np.full(3, 5.0 + rank, f32)}
    made = Running(
        Worker, params, rank=rank, world=2, codec=coordinator.codec, data=coordinator.address,
        control=coordinator.address, host="here",
    )  # fmt: skip
    data = coordinator.accept()
    (tensor,) = (frame := data.recv(WAIT)).tensors
    assert (frame.kind, frame.weight) == (ff.RoundKind.CONTROL, 0.0)
    if rank == 0:
        assert tensor.tolist() == [5.0] * 3
    else:
        assert tensor == Elided((3,)) if revision == "0.8" else tensor.tolist() == [0.0] * 3
    data.send(ff.RoundFrame([np.full(3, 5.0, f32)], ff.RoundKind.CONTROL))
    coordinator.accept()
    worker = made.result()
    assert params["a"].tolist() == [5.0] * 3
    worker.close()
    coordinator.close()


def test_a_reply_without_data_is_zeros():
    """What all ranks elide comes back elided: an average of mass 0, which nobody adopts, or a sum, which is zeros."""
    coordinator = Coordinator("0.8")
    with coordinator.serving({"a": np.full(3, 5.0, f32)}, world=2) as worker:
        out = [np.full(3, 7.0, f32)]
        done = Running(worker._data.all_reduce, out, ff.RoundKind.CONTROL, 0.0, out)
        coordinator.data.recv(WAIT)
        coordinator.data.send(ff.RoundFrame([Elided((3,))], ff.RoundKind.CONTROL))
        assert done.result().tensors[0].tolist() == out[0].tolist() == [0.0] * 3
        counts = ff.RoundFrame([np.array([0, 1], f32)], ff.RoundKind.CONTROL)
        idle = ff.RoundFrame([Elided((3,))], ff.RoundKind.MODEL, 0.0)
        ask_for_an_average(coordinator, worker, [[counts], [idle]])
        assert worker.params[0].tolist() == [5.0] * 3
    coordinator.close()

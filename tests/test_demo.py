"""The demonstration: what crosses its wires, the arithmetic of its rounds, a rank's life, and the command."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference as ref
from conftest import SALT

import flodl_fast as ff
from flodl_fast import cli, demo
from flodl_fast.capture import CaptureWriter, Direction, read_capture

CODEC = ff.Codec(SALT)
RECIPE = demo.Recipe(ranks=3, epochs=3, batch=8, seed=5, samples=250)  # 31 batches, and two images left over


def digits(samples: int, seed: int) -> demo.Digits:
    """Images of noise, which need no data set."""
    rng = np.random.default_rng(seed)
    return demo.Digits(rng.random((samples, 64), np.float32), rng.integers(0, 10, samples))


TRAINING, HELD_OUT = digits(RECIPE.samples, 1), digits(40, 2)


class Frame(NamedTuple):
    """A frame of a capture as the oracle reads it; the message of a round frame is its tensors as NumPy arrays."""

    name: str
    message: Any
    kind: str = ""
    weight: float | None = None


def read(data: bytes, leg: str, direction: Direction, first: bool) -> Frame:
    if first:
        channel, way = leg.split()[2], "hello" if direction is Direction.UP else "ack"
        check = {
            "data hello": lambda: ref.check_data_hello(data, RECIPE.ranks),
            "data ack": lambda: ref.check_data_ack(data),
            "control hello": lambda: ref.check_control_hello(SALT, data, RECIPE.ranks),
            "control ack": lambda: ref.check_control_ack(SALT, data),
        }
        return Frame(f"{channel} {way}", check[f"{channel} {way}"]())
    if leg.endswith("data"):
        frame, left = ref.decode_round(SALT, data)
        tensors = [np.array(ref.floats(t), np.float32).reshape(t["shape"]) for t in frame["tensors"]]
        name = "round"
        message, kind, weight = tensors, frame["kind"], frame["weight"]
    else:
        kind, value, left = ref.decode_frame(SALT, data)
        name, message = ("Metrics", value) if kind == "Metrics" else ref.variant(value)
        weight = None
    assert left == 0
    return Frame(name, message, kind, weight)


class Recording(NamedTuple):
    """A whole training."""

    accuracy: float
    networks: list[demo.Network]
    reports: list[tuple[ff.EpochMetrics, float]]
    totals: np.ndarray
    data: bytes
    legs: dict[tuple[str, Direction], list[Frame]]


def record(recipe: demo.Recipe = RECIPE) -> Recording:
    file = io.BytesIO()
    traffic = demo.Traffic(CaptureWriter(file))
    reports: list[tuple[ff.EpochMetrics, float]] = []
    accuracy, networks = asyncio.run(
        demo.train(CODEC, recipe, TRAINING, HELD_OUT, traffic, lambda *report: reports.append(report))
    )
    legs: dict[tuple[str, Direction], list[Frame]] = {}
    for item in read_capture(io.BytesIO(file.getvalue())):
        frames = legs.setdefault((item.leg, item.direction), [])
        frames.append(read(bytes(item.data), item.leg, item.direction, first=not frames))
    return Recording(accuracy, networks, reports, traffic.totals(), file.getvalue(), legs)


@pytest.fixture(scope="module", autouse=True)
def no_beacons() -> Iterator[None]:
    """None after the first, so that time has no part in what is sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "BEACON_SECONDS", 3600)
        yield


@pytest.fixture(scope="module")
def recorded() -> Recording:
    return record()


def control(recorded: Recording, rank: int, direction: Direction) -> list[Frame]:
    """A rank's control leg after the handshake, without the beacons."""
    frames = recorded.legs[f"rank {rank} control", direction][1:]
    return [frame for frame in frames if frame.name not in ("Heartbeat", "CoordHeartbeat")]


def rounds(recorded: Recording, direction: Direction, kind: str) -> list[list[Frame]]:
    """Per round of that kind the frames of all ranks: those of formation and counts are Control."""
    legs = [recorded.legs[f"rank {rank} data", direction][1:] for rank in range(RECIPE.ranks)]
    return [list(frames) for frames in zip(*legs, strict=True) if frames[0].kind == kind]


def same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return [t.tobytes() for t in a] == [t.tobytes() for t in b]


# 31 batches in shares of 3, 2 and 1; the last rank rests in the second epoch.
BATCHES = [[15, 10, 6], [18, 13, 0], [15, 10, 6]]


# ---------------------------------------------------------------------------------------------------- what crosses


def test_each_rank_is_told_the_epochs_in_the_order_of_the_protocol(recorded):
    epoch = [
        "StartEpoch", "RequestParams", "Throttle", "EpochAggregated", "Update", "SetGlobalStep",
        "ExecuteEvalCallback", "EvalBroadcast",
    ]
    for rank in range(3):
        frames = control(recorded, rank, Direction.DOWN)
        assert [frame.name for frame in frames] == ["SetEpochCallbackRole", *epoch * 3, "Shutdown"]
        assert frames[0].message == {"rank": 0}


def test_plans_share_each_epoch_out(recorded):
    given = [
        [frame.message for frame in control(recorded, rank, Direction.DOWN) if frame.name == "StartEpoch"]
        for rank in range(3)
    ]
    for epoch, batches in enumerate(BATCHES):
        starts = np.cumsum([0, *batches[:-1]]) * 8
        assert [given[rank][epoch] for rank in range(3)] == [
            {"epoch": epoch, "partition_offset": start, "partition_size": 8 * n}
            for start, n in zip(starts, batches, strict=True)
        ]


def test_each_rank_says_what_it_did_in_order(recorded):
    for rank in range(3):
        expected = []
        for batches in BATCHES:
            expected += ["Batch", "LrUpdate"] * batches[rank] + ["Metrics", "SnapshotReady", "SyncAck"]
            expected += ["EvalResult"] * (rank == 0)
        frames = control(recorded, rank, Direction.UP)
        assert [frame.name for frame in frames] == [*expected, "Exiting"]
        assert {frame.message["rank"] for frame in frames} == {rank}
        done = [frame.message for frame in frames if frame.name == "Batch"]
        assert [batch["step_count"] for batch in done] == list(range(1, len(done) + 1))
        assert [batch["param_norm"] is not None for batch in done] == [
            step % 10 == 0 for step in range(1, len(done) + 1)
        ]


def test_beacons_start_at_once_and_go_on(recorded, monkeypatch):
    monkeypatch.setattr(demo, "BEACON_SECONDS", 0)
    for found, least, most in ((recorded, 1, 1), (record(), 10, math.inf)):
        for rank in range(3):
            up, down = (found.legs[f"rank {rank} control", way] for way in (Direction.UP, Direction.DOWN))
            beats = [frame.message["step_count"] for frame in up if frame.name == "Heartbeat"]
            assert beats == list(range(len(beats)))
            assert least <= len(beats) <= most
            assert least <= [frame.name for frame in down].count("CoordHeartbeat") <= most


def test_every_leg_begins_with_its_handshake(recorded):
    for rank in range(3):
        for channel in ("data", "control"):
            hello = recorded.legs[f"rank {rank} {channel}", Direction.UP][0]
            ack = recorded.legs[f"rank {rank} {channel}", Direction.DOWN][0]
            assert (hello.name, hello.message, ack.name) == (f"{channel} hello", rank, f"{channel} ack")


def test_the_learning_rate_follows_the_steps_of_the_cohort(recorded):
    told = [frame.message for frame in control(recorded, 0, Direction.DOWN) if frame.name == "SetGlobalStep"]
    assert [message["global_step"] for message in told] == [31, 62, 93]
    for rank in range(3):
        rates = [f.message["lr"] for f in control(recorded, rank, Direction.UP) if f.name == "LrUpdate"]
        steps = [31 * epoch + step for epoch, batches in enumerate(BATCHES) for step in range(batches[rank])]
        assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * step / 93)) for step in steps])


def test_traffic_counts_every_frame_and_its_prefix_once(recorded):
    records = list(read_capture(io.BytesIO(recorded.data)))
    messages, size, converting, _ = recorded.totals
    assert messages == len(records) == sum(len(frames) for frames in recorded.legs.values())
    handshakes = 3 * 4  # which have no length before them
    assert size == sum(len(item.data) for item in records) + 4 * (len(records) - handshakes)
    assert converting > 0


# ------------------------------------------------------------------------------------------------------------ rounds


def test_formation_gives_everyone_rank_0_parameters(recorded):
    sent, received = (rounds(recorded, way, "Control")[0] for way in (Direction.UP, Direction.DOWN))
    first = demo.Network([RECIPE.seed, 0]).parameters
    assert not same_bits(first, demo.Network([RECIPE.seed, 1]).parameters)
    assert same_bits(sent[0].message, first)
    assert all(not tensor.any() for frame in sent[1:] for tensor in frame.message)
    assert [frame.weight for frame in sent + received] == [0.0] * 6
    # The sum starts from +0.0, so that a -0.0 would come back positive.
    assert all(same_bits(frame.message, [np.float32(0) + t for t in first]) for frame in received)


def test_counts_and_masses_are_the_batches_since_the_last_average(recorded):
    counts = rounds(recorded, Direction.UP, "Control")[1:]
    told = rounds(recorded, Direction.DOWN, "Control")[1:]
    models = rounds(recorded, Direction.UP, "Model")
    assert [[frame.weight for frame in frames] for frames in models] == BATCHES
    assert [[frame.weight for frame in frames] for frames in counts + told] == [[0.0] * 3] * 6
    for batches, frames, replies in zip(BATCHES, counts, told, strict=True):
        assert [frame.message[0].tolist() for frame in frames] == np.diag(batches).tolist()
        assert [frame.message[0].tolist() for frame in replies] == [batches] * 3


def test_each_average_is_numpys_in_the_order_of_the_crate(recorded):
    sent, received = (rounds(recorded, way, "Model") for way in (Direction.UP, Direction.DOWN))
    assert len(sent) == RECIPE.epochs
    for frames, replies in zip(sent, received, strict=True):
        scale = np.float32(1 / sum(frame.weight for frame in frames))
        for reply in replies:
            assert reply.weight == 31
        for i, shape in enumerate([(64, 128), (128,), (128, 10), (10,)]):
            total = np.zeros(shape, np.float32)
            for frame in frames:
                total += frame.message[i]
            total *= scale
            assert {reply.message[i].tobytes() for reply in replies} == {total.tobytes()}


def test_an_idle_rank_sends_zeros_of_mass_0_and_takes_the_average(recorded):
    idle = rounds(recorded, Direction.UP, "Model")[1][2]
    assert idle.weight == 0
    assert not any(tensor.any() for tensor in idle.message)
    report = [f.message for f in control(recorded, 2, Direction.UP) if f.name == "Metrics"][1]
    assert (report["batches_processed"], report["samples_processed"], report["avg_loss"]) == (0, 0, 0.0)
    # It starts the next epoch from the average: its first norm in SyncAck is that of the first reply.
    replies = rounds(recorded, Direction.DOWN, "Model")
    acks = [f.message for f in control(recorded, 2, Direction.UP) if f.name == "SyncAck"]
    before, after = ([np.float64(t).ravel() for t in replies[i][2].message] for i in (0, 1))
    before, after = np.concatenate(before), np.concatenate(after)
    assert acks[1]["pre_norm"] == pytest.approx(np.linalg.norm(before), rel=1e-6)
    assert acks[1]["post_norm"] == pytest.approx(np.linalg.norm(after), rel=1e-6)
    assert acks[1]["divergence"] == pytest.approx(np.linalg.norm(before - after) / np.linalg.norm(after), rel=1e-5)


def test_ranks_end_with_the_bits_of_the_last_average(recorded):
    last = rounds(recorded, Direction.DOWN, "Model")[-1]
    for rank, network in enumerate(recorded.networks):
        assert same_bits(network.parameters, last[rank].message)
        assert same_bits(network.parameters, recorded.networks[0].parameters)


def test_every_ack_closes_the_cycle(recorded):
    for rank in range(3):
        for frame in control(recorded, rank, Direction.UP):
            if frame.name == "SyncAck":
                assert frame.message["step_count"] == 0
                assert frame.message["divergence"] > 0


def test_epoch_metrics_weight_by_batches_and_take_the_longest_time(recorded):
    reports = [
        [f.message for f in control(recorded, rank, Direction.UP) if f.name == "Metrics"] for rank in range(3)
    ]
    aggregated = [f.message for f in control(recorded, 1, Direction.DOWN) if f.name == "EpochAggregated"]
    for epoch, (found, batches) in enumerate(zip(aggregated, BATCHES, strict=True)):
        of = [reports[rank][epoch] for rank in range(3)]
        assert [r["batches_processed"] for r in of] == batches
        assert found["epoch"] == epoch
        assert found["avg_loss"] == pytest.approx(np.average([r["avg_loss"] for r in of], weights=batches))
        means = [r["scalars"]["accuracy"][0] / max(1, r["samples_processed"]) for r in of]
        assert found["scalars"]["accuracy"] == pytest.approx(np.average(means, weights=batches))
        assert found["scalars"]["loss"] == pytest.approx(found["avg_loss"])
        assert [scalars["accuracy"] for scalars in found["per_rank"]] == pytest.approx(means)
        assert found["epoch_ms"] == max(r["epoch_ms"] for r in of)
        assert found["per_rank_batch_share"] == pytest.approx([n / 31 for n in batches])
        assert found["per_rank_compute_only_ms"] == [r["compute_only_ms"] for r in of]
        for r, throughput in zip(of, found["per_rank_throughput"], strict=True):
            assert r["share_complete_ms"] == pytest.approx(r["compute_only_ms"] + r["data_starve_ms"])
            assert throughput * r["share_complete_ms"] == pytest.approx(r["samples_processed"])


def test_evaluations_are_of_the_averaged_parameters(recorded):
    asked = [f.message for f in control(recorded, 1, Direction.DOWN) if f.name == "ExecuteEvalCallback"]
    assert [(m["schedule_id"], m["epoch"], m["target_rank"]) for m in asked] == [
        (0, 1, 0), (1, 2, 0), (2**64 - 1, 3, 0),
    ]
    results = [f.message["metric"] for f in control(recorded, 0, Direction.UP) if f.name == "EvalResult"]
    broadcast = [f.message["metric"] for f in control(recorded, 2, Direction.DOWN) if f.name == "EvalBroadcast"]
    expected = []
    for frames in rounds(recorded, Direction.DOWN, "Model"):
        network = demo.Network([0])
        network.parameters = frames[0].message
        expected.append(network.accuracy(HELD_OUT))
    assert results == broadcast == expected == [accuracy for _, accuracy in recorded.reports]
    assert recorded.accuracy == expected[-1]


def test_the_seed_decides_everything(recorded):
    again = record()
    assert again.accuracy == recorded.accuracy
    assert same_bits(again.networks[0].parameters, recorded.networks[0].parameters)
    other = record(demo.Recipe(3, 1, 8, 6, RECIPE.samples))
    assert not same_bits(other.networks[0].parameters, recorded.networks[0].parameters)


def test_the_network_steps_down_the_gradient():
    """Against differences of the loss, in float64, along the gradient that one step without momentum has taken."""
    batch = digits(16, 3)

    def loss(parameters: list[np.ndarray]) -> float:
        w1, b1, w2, b2 = parameters
        scores = np.maximum(batch.images @ w1 + b1, 0) @ w2 + b2
        scores -= np.log(np.exp(scores).sum(1, keepdims=True))
        return -float(scores[np.arange(16), batch.labels].mean())

    network = demo.Network([4])
    start = [p.astype(np.float64) for p in network.parameters]
    found, _ = network.step(batch, 1e-3)
    assert found == pytest.approx(loss(start), rel=1e-5)
    gradient = [(a - b) / 1e-3 for a, b in zip(start, network.parameters, strict=True)]
    squares = sum(float((g**2).sum()) for g in gradient)
    ahead, behind = ([p + sign * 1e-5 * g for p, g in zip(start, gradient, strict=True)] for sign in (1, -1))
    assert (loss(ahead) - loss(behind)) / 2e-5 == pytest.approx(squares, rel=1e-2)


# ------------------------------------------------------------------------------------------------------- a rank's life


class Script:
    """The coordinator's side of a world of one rank, for a test to play."""

    def __init__(self) -> None:
        recipe = demo.Recipe(ranks=1, epochs=1, batch=8, seed=0, samples=RECIPE.samples)
        self._traffic = demo.Traffic()
        self.rank = demo.Rank(CODEC, 0, recipe, TRAINING, HELD_OUT, self._traffic)
        self._data, self._control = demo.Wire.pair(), demo.Wire.pair()

    async def start(self) -> None:
        self.life = asyncio.create_task(self.rank.life(self._data[1], self._control[1]))
        (self.data,) = await demo.accept(CODEC, "round", [self._data[0]], self._traffic)
        await self.answer(ff.RoundKind.CONTROL)
        (self.control,) = await demo.accept(CODEC, "control", [self._control[0]], self._traffic)

    async def answer(self, kind: ff.RoundKind) -> ff.RoundFrame:
        """One round: returns what the rank sent."""
        frame = await self.data.recv()
        assert frame.kind is kind
        self.data.send(ff.reduce_frames([frame]))
        return frame

    async def expect(self, wanted: type) -> Any:
        while not isinstance(message := await self.control.recv(), wanted):
            assert isinstance(message, (ff.Batch, ff.LrUpdate, ff.Heartbeat)), message
        return message

    async def end(self) -> None:
        self.control.send(ff.Shutdown())
        await self.expect(ff.Exiting)
        await self.life


def play(scene: Callable[[Script], Any]) -> None:
    async def whole() -> None:
        script = Script()
        await script.start()
        await asyncio.wait_for(scene(script), 30)

    asyncio.run(whole())


def test_a_world_in_which_nobody_trained_keeps_its_parameters():
    async def scene(script: Script) -> None:
        before = [p.copy() for p in script.rank.network.parameters]
        script.control.send(ff.RequestParams())
        await script.expect(ff.SnapshotReady)
        await script.answer(ff.RoundKind.CONTROL)
        ack = await script.expect(ff.SyncAck)  # without a round of parameters
        assert ack.divergence == 0
        assert ack.pre_norm == ack.post_norm == pytest.approx(
            math.sqrt(sum(float((p.astype(np.float64) ** 2).sum()) for p in before)), rel=1e-6
        )
        assert same_bits(before, script.rank.network.parameters)
        await script.end()

    play(scene)


def test_parameters_go_out_times_their_mass_and_stay_where_the_reply_weighs_nothing():
    async def scene(script: Script) -> None:
        script.control.send(ff.StartEpoch(ff.EpochPlan(0, 0, 16)))
        await script.expect(ff.MetricsMsg)
        before = [p.copy() for p in script.rank.network.parameters]
        script.control.send(ff.RequestParams())
        await script.expect(ff.SnapshotReady)
        await script.answer(ff.RoundKind.CONTROL)
        frame = await script.data.recv()
        assert frame.weight == 2
        assert same_bits(frame.tensors, [p * np.float32(2) for p in before])
        script.data.send(ff.RoundFrame([np.full_like(t, 9) for t in frame.tensors], ff.RoundKind.MODEL, 0.0))
        assert (await script.expect(ff.SyncAck)).divergence == 0
        assert same_bits(before, script.rank.network.parameters)
        await script.end()

    play(scene)


def test_a_throttled_rank_stands_still_in_its_plan_until_the_update():
    async def scene(script: Script) -> None:
        script.control.send(ff.StartEpoch(ff.EpochPlan(0, 0, 80)))
        first = await script.expect(ff.Batch)
        script.control.send(ff.Throttle())
        script.control.send(ff.RequestParams())
        await script.expect(ff.SnapshotReady)
        frame = await script.answer(ff.RoundKind.CONTROL)
        taken = int(frame.tensors[0][0])
        assert first.step_count <= taken < 10
        assert (await script.answer(ff.RoundKind.MODEL)).weight == taken
        await script.expect(ff.SyncAck)
        for _ in range(20):
            await asyncio.sleep(0)
        assert script.control.poll() is None
        script.control.send(ff.Update(version=1))
        assert (await script.expect(ff.Batch)).step_count == taken + 1
        assert (await script.expect(ff.MetricsMsg)).batches_processed == 10
        await script.end()

    play(scene)


def test_the_plan_in_an_update_is_trained_like_any_other():
    async def scene(script: Script) -> None:
        script.control.send(ff.Update(version=1, next_plan=ff.EpochPlan(4, 8, 24)))
        script.control.send(ff.StartEpoch(ff.EpochPlan(5, 0, 15)))  # one full batch; the rest is dropped
        first, second = await script.expect(ff.MetricsMsg), await script.expect(ff.MetricsMsg)
        assert (first.epoch, first.batches_processed, first.samples_processed) == (4, 3, 24)
        assert (second.epoch, second.batches_processed, second.samples_processed) == (5, 1, 8)
        await script.end()

    play(scene)


def test_a_closed_control_leg_ends_a_rank():
    async def scene(script: Script) -> None:
        script.control.close()
        await script.life
        await script.expect(ff.Exiting)

    play(scene)


def test_a_message_that_no_rank_serves_is_an_error():
    async def scene(script: Script) -> None:
        script.control.send(ff.Checkpoint(version=1, target_rank=0))
        with pytest.raises(NotImplementedError, match="Checkpoint"):
            await script.life

    play(scene)


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_changed_byte_stops_the_training(monkeypatch):
    number, write = count(), demo.Wire.write

    def damaged(self: demo.Wire, data: bytes) -> None:
        data = bytearray(data)
        if next(number) == 40:
            data[-1] ^= 1
        write(self, data)

    monkeypatch.setattr(demo.Wire, "write", damaged)
    with pytest.raises(ff.AuthenticationError):
        record()


def test_a_rank_that_diverged_is_named(monkeypatch):
    step = demo.Network.step

    def diverge(self: demo.Network, batch: demo.Digits, learning_rate: float) -> tuple[float, int]:
        result = step(self, batch, learning_rate)
        if self is networks[1]:
            self.parameters[0][0, 0] = np.nan
        return result

    networks: list[demo.Network] = []
    create = demo.Network.__init__

    def collect(self: demo.Network, seed: Any) -> None:
        create(self, seed)
        networks.append(self)

    monkeypatch.setattr(demo.Network, "__init__", collect)
    monkeypatch.setattr(demo.Network, "step", diverge)
    with pytest.raises(ff.TensorError, match=r"frame 1, tensor \d: nan"):
        record()


def test_a_reply_of_another_size_is_refused():
    async def scene(script: Script) -> None:
        script.control.send(ff.RequestParams())
        await script.data.recv()
        script.data.send(ff.RoundFrame([np.zeros(2, np.float32)], ff.RoundKind.CONTROL))
        with pytest.raises(ff.TensorError, match="went into the round"):
            await script.life

    play(scene)


def test_a_wire_that_ends_too_soon_says_so():
    async def scene() -> None:
        here, there = demo.Wire.pair()
        here.write(b"abc")
        here.close()
        assert await there.read_exactly(2) == b"ab"
        with pytest.raises(ConnectionError, match="1 bytes too soon"):
            await there.read_exactly(2)

    asyncio.run(scene())


# -------------------------------------------------------------------------------------------------------- the command


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_demonstration_reaches_its_target_and_leaves_a_capture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:22]] == [f"{epoch}/20" for epoch in range(1, 21)]
    shown = [float(line.split()[2].rstrip("%")) for line in lines[2:22]]
    found = re.fullmatch(
        r"([\d.]+)% held-out accuracy; ([\d,]+) messages and ([\d,]+) bytes in [\d.]+ s,"
        r" [\d.]+% of it spent converting",
        lines[22],
    )
    assert float(found[1]) == shown[-1] >= 95
    messages, size = (int(found[i].replace(",", "")) for i in (2, 3))
    columns = np.array([[int(cell.replace(",", "")) for cell in line.split()[3:5]] for line in lines[2:22]])
    # After the last epoch only Shutdown and Exiting are left, 3 frames of 4 + 25 and 3 of 4 + 26 bytes.
    assert columns.sum(0).tolist() == [messages - 6, size - 3 * 29 - 3 * 30]

    program, *command = lines[24].split()
    assert program == "python"
    assert command[:3] == ["-m", "flodl_fast", "inspect"]
    assert cli.main([*command[2:], "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(entries) == messages
    handshakes = 12
    assert sum(entry["size"] for entry in entries) == size - 4 * (messages - handshakes)


def test_a_missed_target_is_exit_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "load_digits", lambda: (TRAINING, HELD_OUT))
    file = tmp_path / "a file.cap"
    assert demo.run(options("--epochs", "1", "--capture", str(file), "--salt", f" {SALT.hex()} ")) == 1
    out, err = capsys.readouterr()
    assert "misses the target of 95.0%" in err
    assert f"inspect '{file}' --salt {SALT.hex()}" in out
    with file.open("rb") as source:
        shutdown = [bytes(item.data) for item in read_capture(source) if item.direction is Direction.DOWN][-1]
    assert shutdown == CODEC.encode(ff.Shutdown())


def test_without_a_capture_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "load_digits", lambda: (TRAINING, HELD_OUT))
    monkeypatch.chdir(tmp_path)
    assert demo.run(options("--epochs", "1", "--target", "0", "--no-capture")) == 0
    assert "inspect" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_without_scikit_learn_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert demo.run(options("--no-capture")) == 2
    assert "pip install 'flodl_fast[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ranks", "0"], "start at 1"),
        (["--epochs", "-1"], "start at 1"),
        (["--batch", "251"], "up to 250 images"),
        (["--seed", "-1"], "seed at 0"),
        (["--salt", "ff"], "32 hex digits"),
        (["--capture", "no/such/folder/demo.cap"], "No such file"),
    ],
)
def test_what_cannot_start_is_exit_code_2(tmp_path, monkeypatch, capsys, arguments, reason):
    monkeypatch.setattr(demo, "load_digits", lambda: (TRAINING, HELD_OUT))
    monkeypatch.chdir(tmp_path)
    assert demo.run(options(*arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, reason in err) == ("", True)
    assert list(tmp_path.iterdir()) == []

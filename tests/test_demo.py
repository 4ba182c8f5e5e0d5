"""The demonstration: its processes and what crosses their sockets, the tap between, and the command."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference as ref
from conftest import SALT
from demo_support import Recording, check_inspect, check_order, check_rounds, read_table, same_bits
from support import signed_frame

import flodl_fast as ff
from flodl_fast import cli, demo
from flodl_fast.capture import CaptureWriter, Direction, read_capture

CODEC = ff.Codec(SALT)
RECIPE = demo.Recipe(ranks=3, epochs=3, batch=8, seed=5, samples=250)  # plans of 84, 83, 83: ten batches each
# A batch for each rank and epoch: nothing depends on who is faster.
LOCKSTEP = demo.Recipe(ranks=3, epochs=4, batch=83, seed=5, samples=250)


def digits(samples: int, seed: int) -> demo.Digits:
    """Images of noise, which need no data set."""
    rng = np.random.default_rng(seed)
    return demo.Digits(rng.random((samples, 64), np.float32), rng.integers(0, 10, samples))


TRAINING, HELD_OUT = digits(RECIPE.samples, 1), digits(40, 2)


class Run(NamedTuple):
    """A whole training, its traffic, and what was reported of each epoch."""

    networks: list[demo.Network]
    epochs: list[tuple[int, float, float]]
    totals: np.ndarray
    traffic: Recording


def record(recipe: demo.Recipe = RECIPE) -> Run:
    file = io.BytesIO()
    tap = demo.Tap(ff.Codec(SALT, recipe.revision), CaptureWriter(file, revision=recipe.revision))
    epochs: list[tuple[int, float, float]] = []
    cluster = demo.local_cluster(recipe, SALT.hex())
    networks = demo.train(recipe, SALT.hex(), (TRAINING, HELD_OUT), tap, cluster, lambda *epoch: epochs.append(epoch))
    return Run(networks, epochs, tap.totals(), Recording(file.getvalue(), SALT, recipe.ranks))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as threads of this process, whose start takes no time and which a test can change."""
    monkeypatch.setattr(demo, "ProcessPoolExecutor", lambda ranks, *_: ThreadPoolExecutor(ranks))


@pytest.fixture(scope="module")
def recorded() -> Run:
    return record()


# ---------------------------------------------------------------------------------------------------- what crosses


@pytest.mark.parametrize("revision", ["0.7", "0.8"])
def test_later_revisions(revision, threads):
    """The same run on another wire: the oracle of that revision reads every frame, and 0.8 forms without zeros."""
    run = record(replace(LOCKSTEP, revision=revision))
    assert run.traffic.revision == revision
    check_order(run.traffic)
    assert [metrics["per_rank_samples"] for metrics in run.traffic.control(1, Direction.DOWN, "EpochAggregated")] == [
        [83] * 3
    ] * LOCKSTEP.epochs
    assert len({b"".join(p.tobytes() for p in network.parameters) for network in run.networks}) == 1


def test_every_leg_begins_with_its_handshake(recorded):
    for rank in range(3):
        for channel in ("data", "control"):
            hello = recorded.traffic.legs[f"rank {rank} {channel}", Direction.UP][0]
            ack = recorded.traffic.legs[f"rank {rank} {channel}", Direction.DOWN][0]
            assert (hello.name, hello.message, ack.name) == (f"{channel} hello", rank, f"{channel} ack")


def test_the_capture_tells_what_came_first_and_inspect_finds_no_fault(recorded):
    check_order(recorded.traffic)
    check_inspect(recorded.traffic)


def test_the_tap_counts_every_frame_and_its_prefix_once(recorded):
    messages, size, converting, seconds = recorded.totals
    records = recorded.traffic.records
    assert messages == len(records)
    handshakes = 3 * 4  # which have no length before them
    assert size == sum(len(item.data) for item in records) + 4 * (len(records) - handshakes)
    assert 0 < converting < seconds


def test_ranks_are_told_and_tell_as_the_protocol_says(recorded):
    traffic = recorded.traffic
    for rank, size in enumerate((84, 83, 83)):
        offset = (0, 84, 167)[rank]
        assert traffic.control(rank, Direction.DOWN, "StartEpoch") == [
            {"epoch": epoch, "partition_offset": offset, "partition_size": size} for epoch in range(3)
        ]
        batches = traffic.control(rank, Direction.UP, "Batch")
        assert [batch["step_count"] for batch in batches] == list(range(1, 31))
        assert {batch["rank"] for batch in batches} == {rank}
        names = [frame.name for frame in traffic.legs[f"rank {rank} control", Direction.UP]]
        assert (names[-1], names.count("Metrics"), names.count("LrUpdate")) == ("Exiting", 3, 30)
        told = [frame.name for frame in traffic.legs[f"rank {rank} control", Direction.DOWN]]
        assert [name for name in told if name != "CoordHeartbeat"][-1] == "Shutdown"  # heartbeats go on until it leaves


def test_learning_rates_are_those_of_the_cohorts_steps(recorded):
    schedule = [RECIPE.learning_rate(step) for step in range(91)]
    assert schedule[0] == demo.LEARNING_RATE
    assert RECIPE.learning_rate(RECIPE.epochs * RECIPE.samples / RECIPE.batch / 2) == pytest.approx(0.1)
    assert 0 <= schedule[90] < 0.001
    for rank in range(3):
        rates = [message["lr"] for message in recorded.traffic.control(rank, Direction.UP, "LrUpdate")]
        assert rates[0] == schedule[0]
        assert set(rates) <= set(schedule)


def test_epochs_are_means_over_all_batches(recorded):
    traffic = recorded.traffic
    reports = [traffic.control(rank, Direction.UP, "Metrics") for rank in range(3)]
    told = traffic.control(0, Direction.DOWN, "EpochAggregated")
    assert len(told) == len(recorded.epochs) == 3
    for epoch, (metrics, shown) in enumerate(zip(told, recorded.epochs, strict=True)):
        of = [reports[rank][epoch] for rank in range(3)]
        assert [report["batches_processed"] for report in of] == [10] * 3
        assert all(report["scalars"]["held-out"][1] == 1 for report in of)
        held_out = np.mean([report["scalars"]["held-out"][0] for report in of])
        assert metrics["scalars"] == {"held-out": pytest.approx(held_out)}
        assert metrics["avg_loss"] == pytest.approx(np.mean([report["avg_loss"] for report in of]))
        assert shown == (epoch, metrics["avg_loss"], metrics["scalars"]["held-out"])


# ------------------------------------------------------------------------------------------------------------ rounds


def test_formation_gives_everyone_rank_0s_parameters(recorded):
    sent, came = next(recorded.traffic.rounds("Control"))
    first = demo.Network([RECIPE.seed, 0]).parameters
    assert not same_bits(first, demo.Network([RECIPE.seed, 1]).parameters)
    assert same_bits(sent[0].message, first)
    assert all(not tensor.any() for frame in sent[1:] for tensor in frame.message)
    assert all(same_bits(frame.message, [np.float32(0) + t for t in first]) for frame in came)


def test_each_average_is_numpys_in_the_order_of_the_ranks(recorded):
    averages = check_rounds(recorded.traffic)
    assert averages == len(recorded.traffic.control(0, Direction.UP, "SyncAck")) > 0


def test_masses_are_the_batches_since_the_last_average(recorded):
    _formation, *counts = recorded.traffic.rounds("Control")
    models = list(recorded.traffic.rounds("Model"))
    assert len(counts) == len(models)
    for (said, _), (sent, _) in zip(counts, models, strict=True):
        masses = [frame.weight for frame in sent]
        assert [frame.message[0].tolist() for frame in said] == np.diag(masses).tolist()
    assert np.sum([[frame.weight for frame in sent] for sent, _ in models], axis=0).tolist() == [30.0] * 3


def test_ranks_end_with_the_bits_of_the_last_average(recorded):
    *_, (_, came) = recorded.traffic.rounds("Model")
    for rank, network in enumerate(recorded.networks):
        assert same_bits(network.parameters, came[rank].message)


def test_the_seed_decides_all_that_the_order_of_events_does_not(threads):
    first, again, other = record(LOCKSTEP), record(LOCKSTEP), record(replace(LOCKSTEP, seed=6))
    assert same_bits(first.networks[0].parameters, again.networks[0].parameters)
    assert [loss for _, loss, _ in first.epochs] == [loss for _, loss, _ in again.epochs]
    assert not same_bits(first.networks[0].parameters, other.networks[0].parameters)


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
    found = network.step(batch, 1e-3)
    assert found == pytest.approx(loss(start), rel=1e-5)
    gradient = [(a - b) / 1e-3 for a, b in zip(start, network.parameters, strict=True)]
    squares = sum(float((g**2).sum()) for g in gradient)
    ahead, behind = ([p + sign * 1e-5 * g for p, g in zip(start, gradient, strict=True)] for sign in (1, -1))
    assert (loss(ahead) - loss(behind)) / 2e-5 == pytest.approx(squares, rel=1e-2)


# --------------------------------------------------------------------------------------------------------------- tap


class Ends:
    """Both ends of a connection through a tap, after the handshake: rank 2's and the cluster's."""

    def __init__(self, channel: str) -> None:
        self.file = io.BytesIO()
        self.tap = demo.Tap(CODEC, CaptureWriter(self.file))
        hello, ack = {
            "data": (CODEC.data_hello(2, 3), CODEC.data_ack()),
            "control": (CODEC.control_hello(2, 3), CODEC.control_ack()),
        }[channel]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.tap.routes[channel, 2] = listener.getsockname()
            self.tap.__enter__()
            self.rank = socket.create_connection(self.tap.address)
            self.rank.sendall(hello)
            self.cluster = listener.accept()[0]
        assert self.cluster.recv(100) == hello
        self.cluster.sendall(ack)
        assert self.rank.recv(100) == ack

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *error: Any) -> None:
        self.rank.close()
        self.cluster.close()
        self.tap.__exit__(*error)

    def recorded(self) -> list[tuple[str, Direction, bytes]]:
        """What the capture holds after the handshake."""
        records = list(read_capture(io.BytesIO(self.file.getvalue())))
        return [(item.leg, item.direction, bytes(item.data)) for item in records[2:]]


ROUND = CODEC.encode_round(ff.RoundFrame([np.arange(6, dtype=np.float32)], ff.RoundKind.MODEL, 2.0))
BATCH = CODEC.encode(ff.Batch(2, 1.0, 0.5, 7))
LATER = signed_frame(ff.MsgKind.TIMING, BATCH[24:] + b"\0")  # with a field of a later revision, which may be ignored


@pytest.mark.parametrize(("channel", "frame"), [("data", ROUND), ("control", BATCH)])
def test_bytes_pass_as_they_came_however_they_are_cut(channel, frame):
    sent = ref.add_prefix(frame) * 3
    with Ends(channel) as ends:
        for sender, receiver in ((ends.rank, ends.cluster), (ends.cluster, ends.rank)):
            for at in range(0, len(sent), 11):
                sender.sendall(sent[at : at + 11])
            came = b""
            while len(came) < len(sent):
                came += receiver.recv(1 << 16)
            assert came == sent
    expected = [(f"rank 2 {channel}", way, frame) for way in (Direction.UP, Direction.DOWN) for _ in range(3)]
    assert ends.recorded() == expected
    assert ends.tap.totals()[:2].tolist() == [8, 2 * len(sent) + {"data": 24, "control": 40}[channel]]


@pytest.mark.parametrize(
    ("frame", "error"), [(BATCH[:-1] + b"\x01", "the MAC"), (LATER, "rank 2 control is not the same after decoding")]
)
@pytest.mark.parametrize("up", [True, False])
def test_a_frame_that_conversion_changes_is_recorded_and_ends_its_connection(frame, error, up):
    ends = Ends("control")
    sender, receiver = (ends.rank, ends.cluster) if up else (ends.cluster, ends.rank)
    sender.sendall(ref.add_prefix(BATCH) + ref.add_prefix(frame))
    came = b""
    while data := receiver.recv(1 << 16):
        came += data
    assert came == ref.add_prefix(BATCH)
    with pytest.raises(ff.DecodeError, match=error):
        ends.__exit__()
    assert [data for _, _, data in ends.recorded()] == [BATCH, frame]


def test_a_connection_that_ends_inside_a_frame_ends_at_the_other_side_too():
    with Ends("data") as ends:
        ends.rank.sendall(ref.add_prefix(ROUND)[:-1])
        ends.rank.shutdown(socket.SHUT_WR)
        assert ends.cluster.recv(100) == b""
    assert ends.recorded() == []


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_changed_byte_stops_the_training(threads, monkeypatch):
    number, take = count(), demo._take

    def damaged(source: Any, size: int) -> bytes:
        data = take(source, size)
        return data[:-1] + bytes([data[-1] ^ 1]) if next(number) == 60 else data

    monkeypatch.setattr(demo, "_take", damaged)
    with pytest.raises(ff.AuthenticationError):
        record()


def test_ranks_that_differ_in_the_end_are_an_error(threads, monkeypatch):
    def astray(rank: int, *args: Any) -> demo.Network:
        network = train_rank(rank, *args)
        network.parameters[1][0] += rank == 1
        return network

    train_rank = demo.train_rank
    monkeypatch.setattr(demo, "train_rank", astray)
    with pytest.raises(ff.TensorError, match="different parameters"):
        record(LOCKSTEP)


def test_the_error_of_a_rank_is_raised(threads, monkeypatch):
    number, step = count(), demo.Network.step

    def failing(self: demo.Network, *args: Any) -> float:
        if next(number) == 7:
            raise ZeroDivisionError("in the training")
        return step(self, *args)

    monkeypatch.setattr(demo.Network, "step", failing)
    with pytest.raises(ZeroDivisionError, match="in the training"):
        record()


# -------------------------------------------------------------------------------------------------------- the command


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def noise(threads, monkeypatch, tmp_path) -> Path:
    """The command without scikit-learn and processes, in an empty folder."""
    monkeypatch.setattr(demo, "load_digits", lambda: (TRAINING, HELD_OUT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_demonstration_reaches_its_target_and_leaves_a_capture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    table = read_table(capsys.readouterr().out, epochs=20)
    assert table.accuracy >= 95
    assert table.held_out[-1] >= 95
    assert table.losses[-1] < 0.1 < 0.5 < table.losses[0]

    program, *command = table.inspect[0].split()
    assert program == "python"
    assert command[:4] == ["-m", "flodl_fast", "inspect", "demo.cap"]
    assert cli.main([*command[2:], "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(entries) == table.messages
    assert sum(entry["size"] for entry in entries) == table.bytes - 4 * (table.messages - 12)


def test_epochs_that_are_told_at_once(capsys):
    """The second with no message since the first, as where a controller is read late."""
    tap = demo.Tap(CODEC)
    row = demo._table(RECIPE, tap)
    tap.server_close()
    for epoch in range(2):
        row(epoch, 0.5, 0.25)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        [f"{epoch}/3", "0.5000", "25.0%", "0", "0", "0.0%"] for epoch in (1, 2)
    ]


def test_a_missed_target_is_exit_code_1(noise, capsys):
    arguments = ["--epochs", "1", "--target", "1.01", "--capture", "a file.cap", "--salt", f" {SALT.hex()} "]
    assert demo.run(options(*arguments)) == 1
    out, err = capsys.readouterr()
    assert "misses the target of 101.0%" in err
    assert f"inspect 'a file.cap' --salt {SALT.hex()}" in out
    traffic = Recording((noise / "a file.cap").read_bytes(), SALT, 3)
    assert all(traffic.legs[f"rank {rank} control", Direction.UP][-1].name == "Exiting" for rank in range(3))


def test_without_a_capture_nothing_is_written(noise, capsys):
    assert demo.run(options("--epochs", "1", "--target", "0", "--no-capture")) == 0
    assert "inspect" not in capsys.readouterr().out
    assert list(noise.iterdir()) == []


def test_a_run_that_breaks_is_exit_code_2(noise, monkeypatch, capsys):
    def refused(*_: Any) -> None:
        raise ff.HandshakeError("nobody there")

    monkeypatch.setattr(demo, "train_rank", refused)
    monkeypatch.setattr(demo, "local_cluster", lambda *_: nullcontext(({}, iter(()))))
    assert demo.run(options("--no-capture")) == 2
    assert "error: nobody there" in capsys.readouterr().err


def test_without_scikit_learn_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert demo.run(options("--no-capture")) == 2
    assert "pip install 'flodl_fast[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ranks", "0"], "start at 1"),
        (["--epochs", "-1"], "start at 1"),
        (["--batch", "84"], "ends at 250 images"),
        (["--seed", "-1"], "seed at 0"),
        (["--salt", "ff"], "32 hex digits"),
        (["--capture", "no/such/folder/demo.cap"], "No such file"),
    ],
)
def test_what_cannot_start_is_exit_code_2(noise, capsys, arguments, reason):
    assert demo.run(options(*arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, reason in err) == ("", True)
    assert list(noise.iterdir()) == []


# --------------------------------------------------------------------------------------------------- the crate's side


def test_peer_needs_a_checkout(noise, monkeypatch, capsys):
    monkeypatch.setattr(demo, "BUILD", noise / "build.sh")
    assert demo.run(options("--peer")) == 2
    assert "needs a checkout" in capsys.readouterr().err
    assert list(noise.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="the build is a shell script")
def test_peer_needs_cargo(noise, monkeypatch, capsys):
    (noise / "build.sh").write_text("exit 1\n")
    (noise / "bash").symlink_to(shutil.which("bash"))
    monkeypatch.setattr(demo, "BUILD", noise / "build.sh")
    for name in ("PATH", "HOME"):
        monkeypatch.setenv(name, str(noise))
    assert demo.run(options("--peer")) == 2
    assert "cannot be built: it takes cargo" in capsys.readouterr().err


def test_what_the_controller_prints_is_read_up_to_its_end():
    lines = [
        {"epoch_metrics": {"epoch": n, "avg_loss": 1.0 / (n + 1), "epoch_ms": 3.0, "scalars": {"held-out": n / 4}}}
        for n in range(2)
    ]
    done = {"done": True, "avg_count": 3, "version": 3, "global_step": 9, "last_epoch": 1, "dead": 0}
    assert list(demo._read_epochs(map(json.dumps, [*lines, done]))) == [(0, 1.0, 0.0), (1, 0.5, 0.25)]
    for problem in ({**done, "dead": 1}, {"coord_error": "no ranks"}, {"timeout": True}):
        with pytest.raises(ff.ChannelError, match="the controller says"):
            list(demo._read_epochs(map(json.dumps, [*lines, problem])))

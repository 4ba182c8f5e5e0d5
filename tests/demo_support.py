"""What the demonstration's tests share: captures as the plain-Python oracle reads them, and the checks of any run."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import reference as ref

from flodl_fast.capture import Direction, read_capture
from flodl_fast.inspection import inspect_frames

f32 = np.float32


class Frame(NamedTuple):
    """A frame of a capture. The message of a round frame is its tensors, that of a hello its rank."""

    name: str
    message: Any
    kind: str = ""
    weight: float | None = None


class Recording:
    """The traffic of a run, every MAC checked.

    Attributes:
        frames: (leg, direction, Frame) in the capture's order.
        legs: the frames by leg and direction.
    """

    def __init__(self, data: bytes, salt: bytes, ranks: int) -> None:
        self.data, self.salt, self.ranks = data, salt, ranks
        self.records = list(read_capture(io.BytesIO(data)))
        self.revision = self.records[0].revision
        self.legs: dict[tuple[str, Direction], list[Frame]] = defaultdict(list)
        self.frames: list[tuple[str, Direction, Frame]] = []
        for item in self.records:
            way = self.legs[item.leg, item.direction]
            frame = self._greeting(item) if not way else self._frame(item)
            way.append(frame)
            self.frames.append((item.leg, item.direction, frame))

    def _greeting(self, item: Any) -> Frame:
        data, channel = bytes(item.data), item.leg.split()[2]
        match channel, item.direction:
            case "data", Direction.UP:
                return Frame("data hello", ref.check_data_hello(data, self.ranks, self.revision))
            case "data", Direction.DOWN:
                return Frame("data ack", ref.check_data_ack(data, self.revision))
            case "control", Direction.UP:
                return Frame("control hello", ref.check_control_hello(self.salt, data, self.ranks, self.revision)[0])
        return Frame("control ack", ref.check_control_ack(self.salt, data, self.revision))

    def _frame(self, item: Any) -> Frame:
        data = bytes(item.data)
        if item.leg.endswith("data"):
            frame, left = ref.decode_round(self.salt, data, revision=self.revision)
            tensors = [np.array(ref.floats(t), f32).reshape(t["shape"]) for t in frame["tensors"]]
            found = Frame("round", tensors, frame["kind"], frame["weight"])
        else:
            kind, value, left = ref.decode_frame(self.salt, data, self.revision)
            found = Frame("Metrics", value, kind) if kind == "Metrics" else Frame(*ref.variant(value), kind)
        assert left == 0
        return found

    def control(self, rank: int, direction: Direction, *names: str) -> list[Any]:
        """The messages of these names on a rank's control leg."""
        return [frame.message for frame in self.legs[f"rank {rank} control", direction] if frame.name in names]

    def rounds(self, kind: str) -> Iterator[tuple[list[Frame], list[Frame]]]:
        """What the ranks sent and what came back, round by round; those of formation and counts are "Control"."""
        ways = [
            zip(*(self.legs[f"rank {rank} data", way][1:] for rank in range(self.ranks)), strict=True)
            for way in (Direction.UP, Direction.DOWN)
        ]
        for sent, came in zip(*ways, strict=True):
            assert len({frame.kind for frame in sent + came}) == 1
            if sent[0].kind == kind:
                yield list(sent), list(came)


def same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return [t.tobytes() for t in a] == [t.tobytes() for t in b]


def check_rounds(recording: Recording) -> int:
    """Each sum and average is NumPy's in the crate's arithmetic, in rank order; the number of averages."""
    for sent, came in recording.rounds("Control"):
        total = [sum(tensors, f32(0)) for tensors in zip(*(frame.message for frame in sent), strict=True)]
        assert [frame.weight for frame in sent + came] == [0.0] * 2 * recording.ranks
        assert all(same_bits(frame.message, total) for frame in came)
    models = list(recording.rounds("Model"))
    for sent, came in models:
        weight = sum(frame.weight for frame in sent)
        scale = f32(1 / weight)
        average = [sum(tensors, f32(0)) * scale for tensors in zip(*(frame.message for frame in sent), strict=True)]
        assert [frame.weight for frame in came] == [weight] * recording.ranks
        assert all(same_bits(frame.message, average) for frame in came)
    return len(models)


def check_order(recording: Recording) -> None:
    """A capture tells what happened before what: no answer stands before its question."""
    times = [record.time_ns for record in recording.records]
    assert times == sorted(times)
    seen: dict[tuple[str, Direction], int] = defaultdict(int)
    told: dict[tuple[int, str], int] = defaultdict(int)
    for leg, direction, frame in recording.frames:
        rank, channel = int(leg.split()[1]), leg.split()[2]
        seen[leg, direction] += 1
        told[rank, frame.name] += 1
        up, down = (seen[f"rank {rank} data", way] for way in (Direction.UP, Direction.DOWN))
        if channel == "data":
            assert up - down == (direction is Direction.UP)
            if direction is Direction.DOWN and frame.name == "round":
                assert all(seen[f"rank {other} data", Direction.UP] >= down for other in range(recording.ranks))
        assert told[rank, "SyncAck"] <= told[rank, "SnapshotReady"] <= told[rank, "RequestParams"]
        assert frame.name != "SyncAck" or up == down


def check_inspect(recording: Recording) -> None:
    """``inspect`` finds nothing wrong, and a MAC wherever there can be one."""
    entries = list(inspect_frames(io.BytesIO(recording.data), salt=recording.salt))
    assert len(entries) == len(recording.records)
    assert all(entry.good and not entry.notes for entry in entries)
    assert [entry.mac for entry in entries].count("ok") == len(entries) - 2 * recording.ranks  # data hellos and acks


class Table(NamedTuple):
    """What the command printed."""

    losses: list[float]
    held_out: list[float]
    messages: int
    bytes: int
    accuracy: float
    inspect: list[str]


def read_table(output: str, epochs: int) -> Table:
    lines = output.splitlines()
    assert re.fullmatch(r"3 ranks, [\d,]+ images to train on, [\d,]+ held out", lines[0])
    assert lines[1].split() == ["epoch", "loss", "held-out", "messages", "bytes", "converting"]
    rows = [line.replace(",", "").split() for line in lines[2 : 2 + epochs]]
    assert [row[0] for row in rows] == [f"{epoch}/{epochs}" for epoch in range(1, epochs + 1)]
    assert all(0 <= float(row[5].removesuffix("%")) <= 100 for row in rows)
    found = re.fullmatch(
        r"([\d.]+)% held-out accuracy of the network that all ranks end with; ([\d,]+) messages and ([\d,]+) bytes"
        r" in [\d.]+ s, [\d.]+% of it spent converting",
        lines[2 + epochs],
    )
    messages, size = (int(found[i].replace(",", "")) for i in (2, 3))
    assert sum(int(row[3]) for row in rows) <= messages
    assert sum(int(row[4]) for row in rows) <= size
    losses, held_out = ([float(row[i].removesuffix("%")) for row in rows] for i in (1, 2))
    return Table(losses, held_out, messages, size, float(found[1]), lines[4 + epochs :])

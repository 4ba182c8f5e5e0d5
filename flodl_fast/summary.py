"""What all frames of a recording come to: counts and bytes, MACs, legs, heartbeats, rounds."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .capture import Direction
from .inspection import BAD, Entry

__all__ = ["Round", "Summary", "label", "rank_of"]

BEAT = 1.0  # seconds between two heartbeats (docs/wire.md §8)
LATE = 0.5  # seconds that one may be late before it counts as a gap
SHOWN = 10  # frames with a bad MAC that are named


def label(entry: Entry) -> str:
    """A frame in a few words: control frames by kind and variant, others by their own name first."""
    words = () if entry.frame == "control" and entry.kind else (entry.frame,)
    return " ".join(word for word in (*words, entry.kind, entry.name) if word)


def rank_of(entry: Entry) -> int | None:
    """Whose frame it is: the rank of its leg, else the one that it names itself."""
    if entry.leg_rank is not None:
        return entry.leg_rank
    return entry.inner.rank if entry.rank is None and entry.inner is not None else entry.rank


@dataclass(slots=True)
class Round:
    """One round of one tier: ranks with their relay, or hosts with the controller.

    Attributes:
        tier: "ranks" or "hosts".
        number: from 0, as every leg of the tier counts.
        kind: "Control" or "Model".
        sent: the weight of each leg's frame, by the leg's name.
        reply: the weight of the result; None until it was seen.
        nbytes: of the tensors of one frame.
        began_ns, ended_ns: the first frame sent, the last reply; None without times.
    """

    tier: str
    number: int
    kind: str
    nbytes: int
    sent: dict[str, float] = field(default_factory=dict)
    reply: float | None = None
    began_ns: int | None = None
    ended_ns: int | None = None

    @property
    def seconds(self) -> float | None:
        """From the first frame to the last reply."""
        if self.began_ns is None or self.ended_ns is None:
            return None
        return (self.ended_ns - self.began_ns) / 1e9

    def to_json(self) -> dict[str, Any]:
        """The round as a JSON object."""
        return {
            "tier": self.tier, "number": self.number, "kind": self.kind, "bytes": self.nbytes, "sent": self.sent,
            "reply": self.reply, "time_ns": self.began_ns, "seconds": self.seconds,
        }


@dataclass(slots=True)
class _Beats:
    """The heartbeats of one sender."""

    count: int = 0
    last_ns: int = 0
    longest: float = 0.0
    gaps: list[tuple[int, float]] = field(default_factory=list)  # when one began, seconds

    def add(self, time_ns: int) -> None:
        if self.count:
            gap = (time_ns - self.last_ns) / 1e9
            self.longest = max(self.longest, gap)
            if gap > BEAT + LATE:
                self.gaps.append((self.last_ns, gap))
        self.count += 1
        self.last_ns = time_ns


class Summary:
    """Sums over entries, added one by one.

    Attributes:
        frames, nbytes: of all.
        start_ns, end_ns: the first and last time seen; None without times.
        kinds: how many frames there are of each label, and how many bytes.
        ranks: how many there are of each label and rank; None where it is no rank's.
        macs: how the MACs stand, those of frames inside others included.
        bad: number and leg of the first frames whose MAC is BAD.
        faults: frames that are wrong apart from that.
        legs: frames and bytes of each leg and direction.
        rounds: in the order they began.
        batches: time, rank, loss and duration in ms of each Batch, for plots.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.nbytes = 0
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self.kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.ranks: Counter[tuple[str, int | None]] = Counter()
        self.macs: Counter[str] = Counter()
        self.bad: list[tuple[int, str | None]] = []
        self.faults = 0
        self.legs: dict[tuple[str, Direction], list[int]] = defaultdict(lambda: [0, 0])
        self.rounds: list[Round] = []
        self.batches: list[tuple[int, int, float, float]] = []
        self._beats: dict[str, _Beats] = defaultdict(_Beats)
        self._turns: Counter[tuple[str, str, Direction]] = Counter()
        self._by_number: dict[tuple[str, int], Round] = {}

    def add(self, index: int, entry: Entry) -> None:
        """Count a frame in; its index names it where its MAC is bad."""
        self.frames += 1
        self.nbytes += entry.size
        if entry.time_ns is not None:
            self.start_ns = entry.time_ns if self.start_ns is None else self.start_ns
            self.end_ns = entry.time_ns
        inside = entry.inner if entry.frame == "mux" and entry.inner is not None else entry
        name = label(entry) if inside is entry else f"{label(entry)}: {label(inside)}"
        self.kinds[name][0] += 1
        self.kinds[name][1] += entry.size
        self.ranks[name, rank_of(entry)] += 1
        for part in _parts(entry):
            self.macs[part.mac] += 1
            self.faults += part.fault is not None
        if any(part.mac == BAD for part in _parts(entry)) and len(self.bad) < SHOWN:
            self.bad.append((index, entry.leg))
        if entry.leg is not None and entry.direction is not None:
            leg = self.legs[entry.leg, entry.direction]
            leg[0] += 1
            leg[1] += entry.size
        self._message(entry, inside)
        if inside.frame == "round" and inside.tensors is not None:
            self._round(entry, inside)

    def _message(self, entry: Entry, inside: Entry) -> None:
        time_ns = entry.time_ns
        if inside.kind == "Timing" and inside.name == "Batch" and inside.rank is not None:
            number = len(self.batches) if time_ns is None else time_ns
            self.batches.append((number, inside.rank, inside.fields["batch_loss"], inside.fields["batch_ms"]))
        if time_ns is None:
            return
        # A relay passes a rank's frames on: the beats of its own leg and those in records are told apart.
        where = " in records" if inside is not entry else ""
        if inside.kind == "Timing" and inside.name == "Heartbeat":
            self._beats[f"rank {inside.rank}{where}"].add(time_ns)
        elif inside.name == "CoordHeartbeat":
            self._beats[f"coordinator to rank {rank_of(entry)}{where}"].add(time_ns)

    def _round(self, entry: Entry, inside: Entry) -> None:
        if entry.leg is None or entry.direction is None:
            return
        tier = "ranks" if inside is entry else "hosts"
        up = entry.direction is Direction.UP
        number = self._turns[tier, entry.leg, entry.direction]
        self._turns[tier, entry.leg, entry.direction] += 1
        found = self._by_number.get((tier, number))
        if found is None:
            found = self._by_number[tier, number] = Round(tier, number, inside.kind or "", inside.payload or 0)
            self.rounds.append(found)
        if up:
            found.sent[entry.leg.removesuffix(" data")] = inside.fields["weight"]
            found.began_ns = entry.time_ns if found.began_ns is None else found.began_ns
        else:
            found.reply = inside.fields["weight"]
            found.ended_ns = entry.time_ns

    def beats(self) -> Iterator[tuple[str, int, float, list[tuple[float, float]]]]:
        """Of each sender its name, number of heartbeats, longest interval in seconds, and its gaps.

        A gap is an interval of more than 1.5 s, given as when it began (seconds from the start) and how long it is.
        """
        for name, beats in sorted(self._beats.items()):
            yield name, beats.count, beats.longest, [
                ((at - (self.start_ns or 0)) / 1e9, seconds) for at, seconds in beats.gaps
            ]

    def to_json(self) -> dict[str, Any]:
        """The sums as a JSON object."""
        return {
            "frames": self.frames,
            "bytes": self.nbytes,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "kinds": [
                {
                    "frame": name,
                    "frames": count,
                    "bytes": nbytes,
                    "ranks": {
                        str(rank): n for (of, rank), n in self.ranks.items() if of == name and rank is not None
                    },
                }
                for name, (count, nbytes) in sorted(self.kinds.items())
            ],
            "macs": dict(self.macs),
            "bad": [index for index, _ in self.bad],
            "faults": self.faults,
            "legs": [
                {"leg": leg, "direction": direction.name.lower(), "frames": count, "bytes": nbytes}
                for (leg, direction), (count, nbytes) in sorted(self.legs.items())
            ],
            "heartbeats": [
                {"from": name, "count": count, "longest": longest, "gaps": gaps}
                for name, count, longest, gaps in self.beats()
            ],
            "rounds": [found.to_json() for found in self.rounds],
        }

    def round_times(self, tier: str) -> tuple[float, float, float] | None:
        """The shortest, median and longest round of a tier in seconds; None without any."""
        seconds = [r.seconds for r in self.rounds if r.tier == tier and r.seconds is not None]
        return (min(seconds), statistics.median(seconds), max(seconds)) if seconds else None


def _parts(entry: Entry) -> Iterator[Entry]:
    """The frame and the one inside it."""
    yield entry
    if entry.inner is not None:
        yield from _parts(entry.inner)

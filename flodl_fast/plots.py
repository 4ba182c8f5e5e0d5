"""Pictures of a run and of a machine's speeds, drawn by matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .console import size_text
from .summary import Summary

__all__ = ["plot_rates", "plot_run"]

_INK = "#333333"


def plot_run(summary: Summary, path: str | Path) -> bool:
    """Draw loss, step time and round time over a run; False, and no file, where there is nothing to draw."""
    timed = summary.start_ns is not None
    start = summary.start_ns or 0
    series: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for number, rank, loss, milliseconds in summary.batches:
        series[rank].append(((number - start) / 1e9 if timed else number, loss, milliseconds))
    rounds = [
        (r.tier, r.kind, (r.began_ns - start) / 1e9, r.seconds * 1e3)
        for r in summary.rounds
        if r.began_ns is not None and r.seconds is not None
    ]
    if not series and not rounds:
        return False
    figure = Figure(figsize=(9, 8), layout="constrained")
    loss, step, round_ = figure.subplots(3, 1, sharex=True)
    few = len(series) <= 8
    for rank, points in sorted(series.items()):
        x, losses, times = zip(*points, strict=True)
        name = f"rank {rank}" if few else None
        loss.plot(x, losses, ".", markersize=3, alpha=0.35, color=f"C{rank % 10}")
        loss.plot(x, _smooth(losses), "-", linewidth=1.5, color=f"C{rank % 10}", label=name)
        step.plot(x, times, ".", markersize=3.5, alpha=0.6, color=f"C{rank % 10}")
    marks = {"ranks": "o", "hosts": "s"}
    for i, (tier, kind) in enumerate(sorted({(tier, kind) for tier, kind, *_ in rounds})):
        points_ = [(x, y) for t, k, x, y in rounds if (t, k) == (tier, kind)]
        x, y = zip(*points_, strict=True)
        round_.plot(x, y, marks[tier], markersize=4, alpha=0.7, color=f"C{i}", label=f"{kind}, {tier}")
    for axes, title, unit in (
        (loss, "Loss of each batch, and its running mean", "loss"),
        (step, "Time of each batch", "ms"),
        (round_, "Time of each round, first frame to last reply", "ms"),
    ):
        _dress(axes, title, unit)
    for axes in (step, round_):
        axes.set_yscale("log")  # a hiccup is a hundred times a usual step
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if few and series:
        loss.legend(frameon=False, fontsize=9, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    if rounds:
        round_.legend(frameon=False, fontsize=9, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    round_.set_xlabel("seconds since the first frame" if timed else "batches")
    figure.savefig(path, dpi=150)
    return True


def plot_rates(sizes: Sequence[int], rates: Mapping[str, Sequence[float]], path: str | Path) -> None:
    """Draw rates in GB/s over frame sizes in bytes, a line for each name."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, values) in enumerate(rates.items()):
        ours = not name.startswith(("hashlib", "memcpy"))
        axes.plot(sizes, values, "o-" if ours else "--", markersize=4, linewidth=2 if ours else 1.3,
                  color=f"C{i}" if ours else "#777777" if name.startswith("hashlib") else "#bbbbbb", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(int(size))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    _dress(axes, "Rate over the size of a round frame's tensors", "GB/s")
    axes.set_xlabel("bytes of tensors in a frame")
    figure.legend(frameon=False, fontsize=9, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=150)


def _smooth(values: Sequence[float], weight: float = 0.1) -> list[float]:
    """An exponential running mean."""
    mean, found = values[0], []
    for value in values:
        mean += weight * (value - mean)
        found.append(mean)
    return found


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_ylabel(unit, color=_INK)
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)

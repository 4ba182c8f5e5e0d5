"""How cost grows: with the number of frames, with their size, with the number of tensors and of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import rivals, rows
from .clock import Work, least
from .rows import MIB


@dataclass(frozen=True)
class Plot:
    """Curves over one size.

    Attributes:
        name: of the file.
        title, x, y: the words at the axes.
        sizes: where the curves are measured.
        curves: a name for each, and what makes its Work for a size.
        value: from size and seconds to what is drawn.
        logarithmic: whether the sizes are.
    """

    name: str
    title: str
    x: str
    y: str
    sizes: Sequence[int]
    curves: dict[str, Callable[[int], Work]]
    value: Callable[[int, float], float]
    logarithmic: bool = True


def _million_a_second(count: int, seconds: float) -> float:
    return count / seconds / 1e6


PLOTS = (
    Plot(
        "frames", "Batch frames in one buffer", "frames", "million frames a second",
        [10**exponent for exponent in range(7)],
        {"encode_many": rows.encode_many, "decode_many": rows.decode_many, "timing_columns": rows.columns},
        _million_a_second,
    ),
    Plot(
        "bytes", "A round frame of one tensor", "bytes", "GB/s",
        [64 << 2 * step for step in range(12)],
        {
            "encode_round_into": rows.round_into, "decode_round(out=…)": rows.round_read_out,
            "hashlib.sha256": rivals.hashlib_digest,
        },
        lambda nbytes, seconds: nbytes / seconds / 1e9,
    ),
    Plot(
        "tensors", "A round frame of tensors of 16 floats, layout kept", "tensors", "million tensors a second",
        [1 << step for step in range(17)],
        {"TensorLayout.encode": rows.layout_encode, "TensorLayout.decode_into": rows.layout_decode},
        _million_a_second,
    ),
    Plot(
        "ranks", "Sum of frames of 1 MiB", "ranks", "ms",
        [1, *range(4, 65, 4)],
        {
            "sum_frames": partial(rows.fold, nbytes=MIB),
            "RoundFold": partial(rows.fold_one_by_one, nbytes=MIB),
            "NumPy, in-place adds": lambda count: rivals.numpy_sum(rows.parts(count, MIB)),
        },
        lambda _, seconds: seconds * 1e3, logarithmic=False,
    ),
)  # fmt: skip


def draw(folder: Path) -> None:
    """Measure all curves and write an SVG for each plot; without matplotlib, only say so."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (the extra `plot`)", file=sys.stderr)
        return
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "flodl_fast"}  # small, and alike run by run
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for plot in PLOTS:
        print(f"plot of {plot.name} …", file=sys.stderr, flush=True)
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for name, work in plot.curves.items():
            drawn = [plot.value(size, least(work(size), 0.02, 7)) for size in plot.sizes]
            axes.plot(plot.sizes, drawn, marker=".", label=name)
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
        if plot.logarithmic:
            axes.set_xscale("log", base=10 if plot.name == "frames" else 2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"{plot.name}.svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)

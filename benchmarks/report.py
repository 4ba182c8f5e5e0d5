"""What `make bench` runs: every row with its goal, our figure, the crate's and the verdict; others beside it.

    python -m benchmarks.report [--quick] [--rounds N] [--no-plots]

Crate and libraries take turns, several rounds of them, and the least of each counts. A full run writes tables and
plots into docs/; a quick one only prints, and so does one at another revision than 0.6, which FLODL_BENCH_REVISION
names: codec and crate are then of that revision.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from . import crate, plots
from .child import start
from .rows import MIB, REVISION, ROWS, Row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- measured: `make bench` writes this part -->\n", "<!-- end of the measured part -->\n"
NONE = "\N{EN DASH}"  # where there is no figure
MEMORY_GOAL, MEMORY_HALF = 1 * MIB, 4 * MIB

Figures = dict[str, float]
Table = list[list[str]]


# -- measuring


def measure(rounds: int, seconds: float, windows: int) -> tuple[Figures, dict[str, str]]:
    """The least seconds for each name, "row" or "row/rival", and why others have none."""
    best: Figures = {}
    missing: dict[str, str] = {}

    def ours() -> Iterator[tuple[str, float]]:
        for line in start("--seconds", str(seconds), "--windows", str(windows)):
            if "seconds" in line:
                yield line["name"], line["seconds"]
            elif "error" in line:
                missing[line["name"]] = line["error"]

    turns = [ours, crate.figures]
    try:
        crate.binary()
    except RuntimeError as reason:
        missing["crate"] = str(reason)
        turns.remove(crate.figures)
    for number in range(rounds):
        print(f"turn {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for turn in turns if number % 2 else reversed(turns):
            for name, took in turn():
                best[name] = min(took, best.get(name, took))
    return best, missing


def memory() -> dict[str, int]:
    """For each row that minds memory, the bytes that a call takes besides its result, in a process of its own."""
    found = {}
    for row in ROWS:
        if row.memory is not None:
            for line in start("--memory", row.name):
                if "bytes" in line:
                    found[row.name] = line["bytes"] - row.memory
    return found


# -- what the figures say


def verdict(row: Row, best: Figures) -> str:
    """met, half (of each goal) or missed; a dash where a figure that a goal needs is missing."""
    if row.name not in best or any(f"{row.name}/{name}" not in best for name in row.goals):
        return NONE
    reached = min(best[f"{row.name}/{name}"] / best[row.name] / goal for name, goal in row.goals.items())
    return "met" if reached >= 1 else "half" if reached >= 0.5 else "missed"


def figure(row: Row, seconds: float | None) -> str:
    if seconds is None:
        return NONE
    if row.nbytes:
        return f"{row.nbytes / seconds / 1e9:.3g} GB/s"
    return duration(seconds / row.units) + (" a frame" if row.units > 1 else "")


def duration(seconds: float) -> str:
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def ratio(row: Row, rival: str, best: Figures) -> str:
    """How many times as fast as the rival we are."""
    theirs = best.get(f"{row.name}/{rival}")
    if theirs is None or row.name not in best:
        return NONE if rival in row.rivals or (rival == "crate" and row.crate) else ""
    return f"{theirs / best[row.name]:.3g}"


def goal_table(best: Figures) -> Table:
    table = [["Work", "Goal", "Half of it", "flodl_fast", "crate", "times the crate", "Verdict"]]
    for row in ROWS:
        if row.goals:
            goals = [(goal, "" if name == "crate" else f" {name}") for name, goal in row.goals.items()]
            table.append([
                row.title,
                ", ".join(f"{goal:g} x{name}" for goal, name in goals),
                ", ".join(f"{goal / 2:.3g} x{name}" for goal, name in goals),
                figure(row, best.get(row.name)),
                figure(row, best.get(f"{row.name}/crate")),
                ratio(row, "crate", best),
                verdict(row, best),
            ])  # fmt: skip
    return table


def rival_table(best: Figures) -> Table:
    rivals = list(dict.fromkeys(chain.from_iterable(row.rivals for row in ROWS)))
    table = [["Times as fast as", *rivals]]
    for row in ROWS:
        if row.rivals:
            table.append([row.title, *(ratio(row, rival, best) for rival in rivals)])
    return table


def memory_table(more: dict[str, int]) -> Table:
    table = [["Memory", "Result", "More than that", f"Goal: under {MEMORY_GOAL // MIB} MiB"]]
    for row in ROWS:
        if row.memory is not None:
            size = said = NONE
            if row.name in more:
                took = max(more[row.name], 0)
                size = f"{took / MIB:.2f} MiB"
                said = "met" if took < MEMORY_GOAL else "half" if took < MEMORY_HALF else "missed"
            table.append([row.title, f"{row.memory // MIB} MiB", size, said])
    return table


def machine() -> str:
    """What the figures were measured on."""
    from flodl_fast._codec import sha256_kernel
    from flodl_fast._round import fold_kernel

    cpu = platform.machine()
    with suppress(OSError):  # There only Linux names the model.
        models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = models[0] if models else cpu
    versions = []
    for package in ("flodl_fast", "numpy", "msgspec", "safetensors", "pyarrow"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"{cpu}, {os.cpu_count()} cores; {platform.system()}, CPython {platform.python_version()}, "
        f"{', '.join(versions)}; kernels {sha256_kernel()[0]} and {fold_kernel()[0]}."
    )


# -- how it is shown


def markdown(table: Table) -> str:
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def plain(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "".join("  ".join(map(str.ljust, cells, widths)).rstrip() + "\n" for cells in table)


def write(page: Path, measured: str) -> None:
    """Put what was measured between the page's two marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{measured}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round, printed only")
    parser.add_argument("--rounds", type=int, default=4, help="turns of crate and libraries (default 4)")
    parser.add_argument("--no-plots", action="store_true", help="leave the plots as they are")
    options = parser.parse_args()

    best, missing = measure(1, 0.02, 3) if options.quick else measure(options.rounds, 0.2, 5)
    tables = [goal_table(best), rival_table(best), memory_table(memory())]
    notes = "".join(f"No figure of {name}: {reason}.\n" for name, reason in missing.items())
    print(machine(), *map(plain, tables), notes, sep="\n")
    if not options.quick and REVISION == "0.6":
        write(PAGE, "\n".join([machine() + "\n", *map(markdown, tables), *([notes] if notes else [])]))
        if not options.no_plots:
            plots.draw(ROOT / "docs" / "plots")


if __name__ == "__main__":
    main()

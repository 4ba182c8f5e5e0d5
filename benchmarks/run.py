"""Measure in this process, a JSON line for each name: what report and gate start again and again.

    python -m benchmarks.run [--seconds S] [--windows N] [--memory] [NAME ...]
    python -m benchmarks.run --list

The first line says where flodl_fast was found. A benchmark that does not run gives its error in place of a figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flodl_fast

from .clock import Work, least
from .rows import ROWS, works


def peak(work: Work) -> dict[str, int]:
    """How many bytes more the process held during a call than before: its result and whatever it needed besides.

    Linux only: the high-water mark of the resident set, taken back to the present size before.

    Raises:
        OSError: not on Linux.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work.function(*work.args)  # held, so that it counts
    most = _status("VmHWM")
    del result
    return {"bytes": most - before}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a row, or row/rival; all of them by default")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a window (default 0.2)")
    parser.add_argument("--windows", type=int, default=5, help="windows for each benchmark (default 5)")
    parser.add_argument("--memory", action="store_true", help="measure memory in place of time")
    parser.add_argument("--list", action="store_true", help="name the gate's benchmarks and what loss each allows")
    options = parser.parse_args(args)

    def say(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    if options.list:
        for row in ROWS:
            if row.loss is not None:
                say(name=row.name, loss=row.loss)
        return
    say(package=flodl_fast.__file__)
    measure: Callable[[Work], dict[str, Any]] = (
        peak if options.memory else (lambda work: {"seconds": least(work, options.seconds, options.windows)})
    )
    known = works()
    for name in options.names or known:
        try:
            say(name=name, **measure(known[name]()))
        except Exception as error:
            say(name=name, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

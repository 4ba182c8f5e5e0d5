"""benchmarks.run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def start(*args: str, path: str | None = None, cwd: Path = ROOT) -> Iterator[dict[str, Any]]:
    """The lines that ``python -m benchmarks.run`` prints, as they come.

    Args:
        args: its arguments.
        path: a PYTHONPATH, to measure another build or to use another suite than those found otherwise.
        cwd: where it runs; Python looks there before it looks in ``path``.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.run", *args]
    env: Mapping[str, str] = os.environ if path is None else {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)

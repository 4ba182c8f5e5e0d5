"""The crate's own figures: what `peer bench` prints (interop/peer/README.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from peer import build, find_cargo

from .rows import REVISION, ROWS


@cache
def binary() -> Path:
    """The peer, built where it is not yet.

    Raises:
        RuntimeError: why there is none.
    """
    if sys.platform != "linux":
        raise RuntimeError("the crate's peer builds on Linux only")
    cargo = find_cargo()
    if cargo is None:
        raise RuntimeError("the crate's peer is built by cargo, which is not installed")
    try:
        return build(cargo, f"{REVISION}.0")
    except subprocess.CalledProcessError as error:
        raise RuntimeError("cargo could not build the crate's peer") from error


def figures() -> Iterator[tuple[str, float]]:
    """("row/crate", seconds) for each row that the crate has a figure for; one run of its bench.

    Raises:
        RuntimeError: as ``binary``.
    """
    lines = subprocess.check_output([binary(), "bench"], text=True).splitlines()
    benches = {bench["bench"]: bench for bench in map(json.loads, lines)}
    for row in ROWS:
        if row.crate:
            name, field = row.crate.split(".")
            yield f"{row.name}/crate", _seconds(benches[name], field) * row.units


def _seconds(bench: dict[str, float], field: str) -> float:
    figure = bench[field]
    if field.endswith("_ns"):
        return figure * 1e-9
    if field.endswith("_us"):
        return figure * 1e-6
    return 4 * bench["tensor_bytes"] / (figure * 1e9)  # sum4_GBps_in, of four frames' input

"""Try the package as its users get it: every CPython 3.10 to 3.14 on this machine, both lines of NumPy.

    test_pythons.py [--ends]     only the oldest and the newest that are found

One sdist is made. Each Python found on PATH or among pyenv's builds one wheel from it, against NumPy 2, and
runs the suite of that sdist with the wheel installed: first with NumPy 1.26 where that has a wheel for this
Python, then with the newest NumPy. Live clusters of the crate are left to `make test`: they say nothing about a
Python. A table of outcomes, and of Pythons that were not found, ends the run; the exit code is 1 if any is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "test-pythons"
PYTHONS = [(3, 10), (3, 11), (3, 12), (3, 13), (3, 14)]
OLD_NUMPY, NEW_NUMPY = "==1.26.*", ">=2"
OLD_NUMPY_NEWEST_PYTHON = (3, 12)
PROBE = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
LEFT_OUT = "--ignore-glob=tests/interop/test_*_peer.py"
TAIL = 60  # lines of a failed step's log that are shown


class StepFailed(Exception):
    """A command of one Python's trial failed; its output is in the log."""


def find_python(version: tuple[int, int]) -> str | None:
    """A CPython of that version: on PATH, else the last of pyenv's."""
    name = "python{}.{}".format(*version)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob("{}.{}.*/bin/python".format(*version)), reverse=True)
    for candidate in filter(None, [shutil.which(name), *map(str, installed)]):
        probe = subprocess.run([candidate, "-c", PROBE], capture_output=True, text=True)
        if probe.stdout.split() == ["cpython", *map(str, version)]:
            return candidate
    return None


def run(log: Path, command: list[str | Path], cwd: Path | None = None) -> str:
    """Run a command to its end, keep its output in `log`, and return the last line of it."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with log.open("a") as out:
        out.write(f"$ {' '.join(map(str, command))}\n{done.stdout}\n")
    lines = done.stdout.strip().splitlines() or [""]
    if done.returncode:
        raise StepFailed("\n".join(lines[-TAIL:]))
    return lines[-1].strip("= ")


def make_sdist(folder: Path) -> Path:
    run(LOGS / "sdist.log", [sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT])
    return next(folder.glob("*.tar.gz"))


def build(python: str, sdist: Path, tree: Path, venv: Path, log: Path) -> tuple[Path, Path]:
    """Unpack the sdist, make the environment and the wheel; returns the wheel and the folder of the suite."""
    shutil.unpack_archive(sdist, tree)
    (source,) = tree.iterdir()
    run(log, [python, "-m", "venv", venv])
    run(log, [venv / "bin/python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tree, sdist])
    (wheel,) = tree.glob("*.whl")
    # The suite must meet the wheel, not the sources beside it. The kernels' C stays, for tests of it.
    for path in (source / "flodl_fast").iterdir():
        if path.name != "_native":
            path.unlink()
    return wheel, source


def trial(
    version: tuple[int, int], python: str, sdist: Path, folder: Path
) -> Iterator[tuple[str, bool, str]]:
    """Build and test with one Python; yields what was tried, whether it passed, and what it said."""
    name = "{}.{}".format(*version)
    log, venv = LOGS / f"{name}.log", folder / f"venv-{name}"
    try:
        wheel, suite = build(python, sdist, folder / f"tree-{name}", venv, log)
    except StepFailed as failure:
        yield "wheel", False, str(failure)
        return
    for numpy in [OLD_NUMPY] * (version <= OLD_NUMPY_NEWEST_PYTHON) + [NEW_NUMPY]:
        step = f"NumPy {numpy}"
        try:
            run(log, [venv / "bin/python", "-m", "pip", "install", "-U", f"{wheel}[test]", f"numpy{numpy}"])
            step = "NumPy " + run(log, [venv / "bin/python", "-c", "import numpy; print(numpy.__version__)"])
            yield step, True, run(log, [venv / "bin/python", "-m", "pytest", "-q", LEFT_OUT], cwd=suite)
        except StepFailed as failure:
            yield step, False, str(failure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Try the package with every CPython found here.")
    parser.add_argument("--ends", action="store_true", help="only the oldest and the newest")
    ends = parser.parse_args().ends
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    found = {version: find_python(version) for version in PYTHONS}
    if ends:
        there = [version for version, python in found.items() if python]
        found = {version: found[version] for version in there[:1] + there[-1:]}
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        folder = Path(scratch)
        sdist = make_sdist(folder)
        trials = {
            version: pool.submit(lambda *args: list(trial(*args)), version, python, sdist, folder)
            for version, python in found.items()
            if python
        }
        for version, outcome in trials.items():
            for step, passed, said in outcome.result():
                if not passed:
                    print("--- CPython {}.{}, {}:\n{}\n".format(*version, step, said), flush=True)
                    said = f"see {LOGS.relative_to(ROOT)}"
                rows.append(("{}.{}".format(*version), step, "passed" if passed else "FAILED", said))
    for row in [("CPython", "with", "outcome", ""), *rows]:
        print("{:8} {:14} {:8} {}".format(*row))
    for version, python in found.items():
        if python is None:
            print("{:8} not found on this machine".format("{}.{}".format(*version)))
    failed = sum(outcome == "FAILED" for _, _, outcome, _ in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())

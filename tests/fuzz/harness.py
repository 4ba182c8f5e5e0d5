"""Run the targets of ``targets.py`` under libFuzzer: ``python harness.py SECONDS FOLDER [TARGET ...]``, all by default.

Each runs in a process of its own for so many seconds. ``FOLDER/TARGET/`` takes what it makes: ``log``; ``corpus/``, the
inputs that reached new code, which the next run starts from; and ``crash-…``, ``timeout-…`` or ``oom-…``, an input that
broke the target. Copied to ``corpus/TARGET/`` beside this file, such an input is a test. The exit code is 1 where one
was found. ``make fuzz`` builds the extensions so that they guide the fuzzer by their coverage, watched by the address
sanitizer, and preloads what such extensions need.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import atheris

LARGEST = 20_000  # bytes of an input
SLOWEST = 10  # seconds for one
MEMORY = 2048  # MiB for the whole process

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # conftest.py and others that targets.py imports


def fuzz(name: str, seconds: str, folder: str) -> None:
    """Run one target in this process, which ends with it."""
    with atheris.instrument_imports(include=["flodl_fast"]):
        from targets import CORPUS, TARGETS, seeds
    base = Path(folder)
    corpus, start = base / "corpus", base / "seeds"
    for place in (corpus, start):
        place.mkdir(parents=True, exist_ok=True)
    for data in (*seeds(name), *(path.read_bytes() for path in (CORPUS / name).glob("*"))):
        (start / hashlib.sha256(data).hexdigest()).write_bytes(data)
    options = {
        "max_total_time": seconds, "max_len": LARGEST, "timeout": SLOWEST, "rss_limit_mb": MEMORY,
        "artifact_prefix": f"{base}/", "print_final_stats": 1,
    }
    atheris.Setup([name, *(f"-{key}={value}" for key, value in options.items()), str(corpus), str(start)],
                  TARGETS[name])
    atheris.Fuzz()


def run(name: str, seconds: str, folder: Path) -> bool:
    """Run one target in a process of its own and print what came of it; returns whether nothing was found."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("w") as log:
        code = subprocess.run([sys.executable, __file__, "--one", name, seconds, folder], stdout=log,
                              stderr=log).returncode
    said = (folder / "log").read_text(errors="replace")
    inputs, edges = (re.findall(pattern, said) for pattern in (r"number_of_executed_units: (\d+)", r" cov: (\d+)"))
    print(f"{name:16} {(inputs or '?')[-1]:>10} {(edges or '?')[-1]:>8} {'nothing' if code == 0 else 'SEE ITS LOG'}",
          flush=True)
    return code == 0


def main(seconds: str, folder: str, *names: str) -> int:
    """Run these targets, or all, one after the other."""
    from targets import TARGETS

    print(f"{'target':16} {'inputs':>10} {'edges':>8} found, {seconds} s each", flush=True)
    found = [run(name, seconds, Path(folder) / name) for name in names or TARGETS]
    return 0 if all(found) else 1


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        fuzz(*sys.argv[2:])
    sys.exit(main(*sys.argv[1:]))

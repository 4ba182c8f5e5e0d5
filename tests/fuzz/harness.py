"""Run one target of ``targets.py`` under libFuzzer for some seconds: ``python harness.py TARGET SECONDS FOLDER``.

The folder takes what it makes: ``corpus/``, the inputs that reached new code, kept for the next run, and
``crash-…``, ``timeout-…`` or ``oom-…``, an input that broke the target; copied to ``corpus/TARGET/`` beside this file
it is a test. The exit code is 0 where nothing was found.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["flodl_fast"]):
    import flodl_fast  # noqa: F401
from targets import CORPUS, TARGETS, seeds

LARGEST = 20_000  # bytes of an input
SLOWEST = 10  # seconds for one
MEMORY = 2048  # MiB for the whole process


def main(name: str, seconds: str, folder: str) -> None:
    base = Path(folder)
    corpus, start = base / "corpus", base / "seeds"
    for place in (corpus, start):
        place.mkdir(parents=True, exist_ok=True)
    found_before = [path.read_bytes() for path in (CORPUS / name).glob("*")]
    for data in (*seeds(name), *found_before):
        (start / hashlib.sha256(data).hexdigest()).write_bytes(data)
    atheris.Setup(
        [
            name, str(corpus), str(start), f"-max_total_time={seconds}", f"-max_len={LARGEST}", f"-timeout={SLOWEST}",
            f"-rss_limit_mb={MEMORY}", f"-artifact_prefix={base}/", "-print_final_stats=1",
        ],
        TARGETS[name],
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])

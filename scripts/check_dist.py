"""What stands in dist/, as an index and a user without a compiler would take it; `make check-dist` runs it.

The checks: metadata and README (twine), the wheel's contents (check-wheel-contents), the C
library that it asks for (auditwheel), its size, its import in time, and part of the suite with the wheel installed in a
fresh environment where no compiler can be found. Last come the wheels that cibuildwheel would build on each platform.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MOST_BYTES = 1 << 20
MOST_MS = 50.0
TRIES = 10
PLATFORMS = ("linux", "macos", "windows")
SUITES = ["test_package.py", "test_messages.py", "test_codec.py", "test_round.py", "test_stream.py", "test_kernels.py"]
CLOCK = (
    # Of this thread: those that NumPy's linear algebra starts spin for a while, whoever is imported next.
    "import time, numpy; began = time.thread_time(); import flodl_fast; print((time.thread_time() - began) * 1000)"
)


def run(*command: str | Path, **options: object) -> str:
    print("$", *command, flush=True)
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(map(str, command))}")
    return str(done.stdout)


def tool(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def try_wheel(wheel: Path, sdist: Path, folder: Path) -> None:
    """Install the wheel beside the suite of the sdist, both far from the checkout and from any compiler."""
    python = folder / "venv" / "bin" / "python"
    bare = {"PATH": str(python.parent), "HOME": str(folder), "CC": "/nonexistent"}
    bare |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    run(sys.executable, "-m", "venv", folder / "venv")
    run(python, "-m", "pip", "install", "-q", "--only-binary", ":all:", f"{wheel}[test]", env=bare)
    shutil.unpack_archive(sdist, folder)
    (suite,) = folder.glob("flodl_fast-*")
    shutil.rmtree(suite / "flodl_fast")  # the suite must meet the wheel
    run(python, "-m", "pytest", "-q", *(f"tests/{name}" for name in SUITES), cwd=suite, env=bare)
    run(python, "-m", "flodl_fast", "info", cwd=folder, env=bare)
    ms = min(float(subprocess.check_output([python, "-c", CLOCK], cwd=folder, env=bare)) for _ in range(TRIES))
    print(f"import on top of NumPy's: {ms:.1f} ms of CPU time, the least of {TRIES} (at most {MOST_MS:.0f})")
    if ms > MOST_MS:
        raise SystemExit("the import takes too long")


def main() -> None:
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(tool("twine"), "check", "--strict", wheel, sdist)
    run(tool("check-wheel-contents"), wheel)
    if sys.platform == "linux":
        run(tool("auditwheel"), "show", wheel)
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size / 1024:,.0f} KiB (less than {MOST_BYTES >> 10})")
    if size >= MOST_BYTES:
        raise SystemExit("the wheel is too large")
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, sdist, Path(folder))
    for platform in PLATFORMS:
        run(tool("cibuildwheel"), "--platform", platform, "--print-build-identifiers", ROOT)


if __name__ == "__main__":
    main()

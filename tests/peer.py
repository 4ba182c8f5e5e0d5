"""The published flodl crate as a subprocess: build it, ask it (interop/peer/README.md)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parents[1] / "interop" / "peer" / "build.sh"


def find_cargo() -> Path | None:
    """The cargo on the PATH, or where rustup puts it."""
    home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    found = shutil.which("cargo") or shutil.which("cargo", path=str(home / "bin"))
    return Path(found) if found else None


def build(cargo: Path, version: str = "0.6.0") -> Path:
    """The peer's binary, built unless it was before: about a minute then.

    Raises subprocess.CalledProcessError where the build fails; its text goes to stderr.
    """
    env = {**os.environ, "PATH": f"{cargo.parent}{os.pathsep}{os.environ['PATH']}"}
    return Path(subprocess.check_output(["bash", BUILD, version], text=True, env=env).strip())


ABORTED = {"error": "the crate aborted"}


class Peer:
    """`peer <mode>` as a long-lived process: one JSON object in, one out.

    A question waits for its answer, so neither pipe can fill up against the other. Where the crate takes its
    whole process down, as on a huge string length, the answer is ABORTED and the next question meets a fresh
    process.
    """

    def __init__(self, binary: Path, mode: str):
        self._command = [str(binary), mode]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question, allow_nan=False).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            return ABORTED
        return json.loads(answer)

    def ask_many(self, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self.ask(question) for question in questions]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""The Python examples of the README and of every page of docs/ run as they stand there.

A block that begins with a comment of a file's name is that file. It is run where no other block of its page names it: a
rank, known by ``Worker.from_env``, in threes under a LocalCluster, anything else by itself. The other blocks of a page
run in order and share their names. The README's files are there for all pages.

``python tests/test_docs.py FOLDER`` writes them all as modules, for type checkers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flodl_fast as ff

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
IMPORT = re.compile(r"^ *(?:import|from) (\w+)", re.MULTILINE)
# Of a rank that its page starts nowhere; 0.8 asks most of one.
RUN: dict[str, Any] = {"world": 3, "samples": 1024, "batch": 32, "epochs": 2, "revision": "0.8"}
SECONDS = 120


def blocks_of(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def file_of(block: str) -> str | None:
    """The name of the file that a block is."""
    found = re.match(r"# (\S+\.py)\n", block)
    return found[1] if found else None


def missing(block: str) -> list[str]:
    """The modules that a block imports and this environment lacks."""
    return [name for name in IMPORT.findall(block) if importlib.util.find_spec(name) is None]


def run(block: str, folder: Path, scope: dict[str, Any]) -> str:
    """Run one block; returns what a file printed."""
    name = file_of(block)
    if name is None:
        exec(compile(block, "example", "exec"), scope)
        return ""
    command = [sys.executable, name]
    if "Worker.from_env" not in block:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with ff.LocalCluster(**RUN) as cluster:
        ranks = [
            subprocess.Popen(command, cwd=folder, env={**os.environ, **cluster.environment(n)}, stdout=subprocess.PIPE)
            for n in range(3)
        ]
        said = [rank.communicate(timeout=SECONDS)[0].decode() for rank in ranks]
        assert not cluster.wait(SECONDS).dead
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    return "".join(said)


def run_page(page: Path, folder: Path) -> dict[str, str]:
    """Run a page's blocks; returns what its files printed."""
    blocks = blocks_of(page)
    for block in (*blocks_of(PAGES[0]), *blocks):
        if name := file_of(block):
            (folder / name).write_text(block, encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "__main__"}
    said, lacking = {}, set()
    for block in blocks:
        name = file_of(block)
        if name is not None and any(name in other for other in blocks if other is not block):
            continue
        if absent := missing(block):
            lacking.update(absent)
            continue
        said[name or ""] = run(block, folder, scope)
    if lacking:
        pytest.skip(f"all but the examples that need {', '.join(sorted(lacking))} have run: not installed")
    return said


@pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", "3")  # three interpreters that load a framework at the same time
    said = run_page(page, tmp_path)
    if page == PAGES[0]:
        # Every rank prints what the average has learnt: the numbers from 1 to 8.
        assert re.findall(r"epoch (\d)", said["local.py"]) == ["0", "1", "2", "3", "4"]
        learnt = [[float(n) for n in row.split()] for row in re.findall(r"\[(.*?)\]", said["local.py"], re.DOTALL)]
        assert len(learnt) == 3
        assert all(abs(weight - (i + 1)) < 0.05 for row in learnt for i, weight in enumerate(row))


def test_the_readmes_rank_runs_at_the_newest_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLODL_NET_TIMEOUT_SCALE", "3")
    (rank,) = [block for block in blocks_of(PAGES[0]) if file_of(block) == "train.py"]
    (tmp_path / "train.py").write_text(rank, encoding="utf-8")
    assert run(rank, tmp_path, {}).count("[") == 3


def write_modules(folder: Path) -> None:
    """Each file of a page, and its other blocks together, as a module named after the page."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in PAGES:
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts).lower()
        blocks = blocks_of(page)
        modules = {f"{name}_{file}": block for block in blocks if (file := file_of(block))}
        if rest := [block for block in blocks if not file_of(block)]:
            modules[f"{name}.py"] = "\n\n".join(rest)
        for module, text in modules.items():
            (folder / module).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_modules(Path(sys.argv[1]))

"""The gate: no benchmark of the candidate may be slower than the base's by more than it allows, and none may vanish.

    python -m benchmarks.gate --base REV [--candidate REV]      the working tree is the default candidate
    python -m benchmarks.gate --self-check N [--candidate REV]  one build against itself, N times: none may fail

Both are built side by side and measured in turns within one job: a process each a round, the order swapped every
round, the least time of each benchmark kept. Both do the work that the candidate's suite describes. What then looks
like a loss or a gain is measured again before it is called one, and so is a least time that no other sample comes
near: noise goes away, a loss stays.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .child import ROOT, start

WORKTREE = "worktree"
FLOOR = 20e-9  # Seconds a call: below this a difference is the clock's and the loop's, whatever its ratio.
AGREE = 1.03  # Two samples this close are the same.
SECONDS, WINDOWS = 0.001, 120  # So short that on a busy machine some pass without anything else between.
AGAIN, LOSSES_AGAIN = 2, 5  # How often what is doubtful is measured again at most, and what still looks like a loss.

Figures = dict[str, float]


# -- the verdict, on samples alone


@dataclass(frozen=True)
class Finding:
    """What the gate says of one benchmark: "loss" and "vanished" fail, "new" is a note."""

    kind: str
    name: str
    text: str


def losses(limits: Mapping[str, float], base: Figures, candidate: Figures) -> list[str]:
    """The benchmarks that got slower than they may, beyond the noise floor."""
    return [
        name
        for name in sorted(base.keys() & candidate.keys() & limits.keys())
        if candidate[name] - base[name] > max(FLOOR, (limits[name] - 1) * base[name])
    ]


def unsettled(samples: Mapping[str, list[float]]) -> list[str]:
    """The benchmarks whose two best samples differ: something else may have run beside all of them."""
    return [name for name, taken in samples.items() if sorted(taken)[:2][-1] > AGREE * min(taken)]


def judge(limits: Mapping[str, float], known: Iterable[str], base: Figures, candidate: Figures) -> list[Finding]:
    """Compare two builds.

    Args:
        limits: for each benchmark of the candidate's suite, how many times the base's time it may take.
        known: the benchmarks of the base's own suite.
        base, candidate: the least seconds of those that ran.
    """
    findings = [
        Finding(
            "loss", name,
            f"{base[name] * 1e6:.4g} µs at the base, {candidate[name] * 1e6:.4g} µs at the candidate: "
            f"{candidate[name] / base[name]:.3f} times, {limits[name]:g} allowed",
        )
        for name in losses(limits, base, candidate)
    ]  # fmt: skip
    for name in sorted((limits.keys() | set(known)) - candidate.keys()):
        text = "the candidate cannot run it" if name in limits else "the candidate's suite does not have it"
        findings.append(Finding("vanished", name, text))
    findings += [Finding("new", name, "the base cannot run it") for name in sorted(candidate.keys() - base.keys())]
    return findings


def fails(findings: Iterable[Finding]) -> bool:
    return any(finding.kind != "new" for finding in findings)


# -- measuring


@dataclass(frozen=True)
class Side:
    """One build under measurement.

    Attributes:
        path: the folders where its suite and its build are found, in this order, as in PYTHONPATH.
        package: the folder of the build's flodl_fast, which is checked.
    """

    path: tuple[Path, ...]
    package: Path

    def run(self, *args: str) -> Iterable[dict[str, Any]]:
        """What ``benchmarks.run`` says of this build."""
        return start(*args, path=os.pathsep.join(map(str, self.path)), cwd=self.package.parent)

    def limits(self) -> dict[str, float]:
        """The suite's benchmarks, and how many times the base's time each may take; none where there is no suite."""
        if not (self.path[0] / "benchmarks" / "run.py").exists():
            return {}
        return {line["name"]: line["loss"] for line in self.run("--list")}

    def sample(self, names: Iterable[str], samples: dict[str, list[float]]) -> None:
        """Measure in a new process and add to the samples."""
        for line in self.run("--seconds", str(SECONDS), "--windows", str(WINDOWS), *names):
            if "package" in line and not self.package.samefile(Path(line["package"]).parent):
                raise RuntimeError(f"measured {line['package']} in place of {self.package}")
            if "seconds" in line:
                samples.setdefault(line["name"], []).append(line["seconds"])
            if "error" in line:
                print(f"{line['name']} does not run: {line['error']}", file=sys.stderr)


def compare(base: Side, candidate: Side, limits: Mapping[str, float], rounds: int) -> tuple[Figures, Figures]:
    """The least seconds of each benchmark at base and candidate; doubtful ones are measured again and again."""
    turns: list[tuple[Side, dict[str, list[float]]]] = [(base, {}), (candidate, {})]
    names = list(limits)
    for again in range(1 + LOSSES_AGAIN):
        for number in range(rounds):
            for side, samples in turns if number % 2 else reversed(turns):
                side.sample(names, samples)
        before, after = ({name: min(taken) for name, taken in samples.items()} for _, samples in turns)
        doubtful = {*losses(limits, before, after)}
        if again < AGAIN:
            doubtful |= {*losses(limits, after, before), *unsettled(turns[0][1]), *unsettled(turns[1][1])}
        names = [name for name in limits if name in doubtful]
        if not names:
            break
    return before, after


# -- building


def unpack(revision: str, tree: Path) -> None:
    """The files of a revision, or of the working tree as it stands, into a new folder."""
    tree.mkdir(parents=True)
    if revision != WORKTREE:
        packed = subprocess.check_output(["git", "archive", revision], cwd=ROOT)
        subprocess.run(["tar", "-x", "-C", tree], input=packed, check=True)
        return
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)


def build(revision: str, folder: Path) -> Side:
    """Install a revision into a folder of its own; dependencies are shared with this Python."""
    source, suite, site = folder / "source", folder / "suite", folder / "site"
    unpack(revision, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, source]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{revision} does not build:\n{done.stdout}")
    # The suite stands alone: beside it, the package's sources would be found before the build.
    if (source / "benchmarks").exists():
        shutil.copytree(source / "benchmarks", suite / "benchmarks")
    return Side((suite, site), site / "flodl_fast")


# -- the commands


def table(limits: Mapping[str, float], base: Figures, candidate: Figures) -> str:
    lines = [f"{'benchmark':16} {'base, µs':>12} {'candidate':>12} {'times':>7} {'allowed':>8}"]
    for name, limit in limits.items():
        if name in base and name in candidate:
            old, new = base[name] * 1e6, candidate[name] * 1e6
            lines.append(f"{name:16} {old:12.3f} {new:12.3f} {new / old:7.3f} {limit:8g}")
    return "\n".join(lines)


def gate(base: Side, candidate: Side, rounds: int) -> bool:
    """Compare two builds, print what was measured and found; whether the candidate passes."""
    known, limits = base.limits(), candidate.limits()
    # Both do the work that the candidate's suite describes.
    base = Side((candidate.path[0], *base.path[1:]), base.package)
    before, after = compare(base, candidate, limits, rounds)
    findings = judge(limits, known, before, after)
    print(table(limits, before, after))
    for finding in findings:
        print(f"{finding.kind}: {finding.name}: {finding.text}", flush=True)
    return not fails(findings)


def self_check(build: Side, rounds: int, times: int) -> bool:
    """Gate a build against itself, again and again; whether it passed each time."""
    failed = 0
    for number in range(times):
        print(f"\ngate {number + 1} of {times}", flush=True)
        failed += not gate(build, build, rounds)
    print(f"\n{times} gates of one build against itself, {failed} failed")
    return failed == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gate", description=__doc__.partition("\n")[0])
    parser.add_argument("--candidate", metavar="REV", default=WORKTREE, help=f"default: the {WORKTREE}")
    parser.add_argument("--rounds", type=int, default=4, help="processes for each build (default 4)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--base", metavar="REV", help="the revision to compare with")
    what.add_argument("--self-check", type=int, metavar="N", help="compare the candidate with itself, N times")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        candidate = pool.submit(build, options.candidate, Path(scratch, "candidate"))
        if options.self_check:
            passed = self_check(candidate.result(), options.rounds, options.self_check)
        else:
            base = pool.submit(build, options.base, Path(scratch, "base"))
            passed = gate(base.result(), candidate.result(), options.rounds)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

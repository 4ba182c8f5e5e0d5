"""The benchmark gate: one build passes against itself, a function slowed by 30 % fails by name (public case 21)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import flodl_fast

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from benchmarks import gate  # noqa: E402

LIMITS = {"batch_encode": 1.15, "decode_many": 1.15, "epoch_decode": 1.15, "round_1MiB_into": 1.1}

# Least microseconds at base and candidate, from twenty gates of one build against itself on a busy machine.
# fmt: off
RECORDED = {
    "batch_encode": [
        (0.157, 0.158), (0.153, 0.152), (0.159, 0.160), (0.156, 0.158), (0.154, 0.152), (0.152, 0.152),
        (0.153, 0.152), (0.153, 0.152), (0.154, 0.151), (0.154, 0.152), (0.152, 0.151), (0.153, 0.150),
        (0.154, 0.154), (0.151, 0.150), (0.159, 0.156), (0.154, 0.152), (0.152, 0.153), (0.153, 0.156),
        (0.150, 0.154), (0.163, 0.154),
    ],
    "decode_many": [
        (3766, 3777), (3796, 3693), (3863, 3865), (3907, 3932), (3896, 3987), (4267, 3780), (3790, 4004),
        (3823, 3844), (3777, 3789), (3922, 3986), (3889, 3891), (3841, 3878), (3799, 3814), (3886, 3852),
        (3829, 3872), (3854, 3801), (3840, 3835), (3857, 3872), (3754, 4012), (3916, 3857),
    ],
    "epoch_decode": [
        (4.06, 4.04), (4.07, 4.04), (4.03, 4.10), (4.08, 4.12), (4.06, 4.00), (4.04, 4.09), (4.03, 3.97),
        (4.00, 4.03), (4.12, 4.00), (4.10, 4.04), (3.95, 4.10), (4.01, 4.05), (4.10, 4.05), (4.03, 4.09),
        (4.00, 4.07), (4.05, 4.04), (4.02, 4.12), (4.06, 4.01), (4.00, 4.06), (4.12, 4.04),
    ],
    "round_1MiB_into": [
        (605, 605), (607, 609), (609, 608), (609, 607), (605, 603), (604, 606), (603, 604), (607, 605), (604, 610),
        (603, 607), (602, 612), (605, 604), (607, 609), (605, 608), (609, 608), (604, 618), (614, 605), (606, 604),
        (604, 605), (606, 605),
    ],
}
# fmt: on
GATES = range(20)

# The process that measures has a clock by which a function takes so long, whatever else the machine does.
CLOCK = """
import time
from flodl_fast import Codec
now = 0.0
def taking(seconds, function):
    def timed(*args):
        global now
        now += seconds
        return function(*args)
    return timed
Codec.encode_many = taking({}, Codec.encode_many)
Codec.encode_round_into = taking(0.010, Codec.encode_round_into)
time.perf_counter = lambda: now
"""


def recorded(number: int) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds of one of the recorded gates, at base and at candidate."""
    pairs = {name: gates[number] for name, gates in RECORDED.items()}
    return {name: base * 1e-6 for name, (base, _) in pairs.items()}, {
        name: candidate * 1e-6 for name, (_, candidate) in pairs.items()
    }


def found(findings: list[gate.Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.name) for finding in findings]


@pytest.mark.parametrize("number", GATES)
def test_one_build_passes_against_itself(number):
    assert gate.judge(LIMITS, LIMITS, *recorded(number)) == []


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("number", GATES)
def test_a_function_slowed_by_30_percent_is_named(number, name):
    base, candidate = recorded(number)
    candidate[name] *= 1.3
    (finding,) = gate.judge(LIMITS, LIMITS, base, candidate)
    assert (finding.kind, finding.name) == ("loss", name)
    assert f"{base[name] * 1e6:.4g} µs at the base" in finding.text
    assert f"{candidate[name] * 1e6:.4g} µs at the candidate" in finding.text
    assert f"{candidate[name] / base[name]:.3f} times" in finding.text


def test_each_benchmark_has_a_limit_of_its_own():
    base, candidate = {"a": 1e-3, "b": 1e-3}, {"a": 1.2e-3, "b": 1.2e-3}
    assert found(gate.judge({"a": 1.15, "b": 1.25}, base, base, candidate)) == [("loss", "a")]


def test_what_is_below_the_noise_floor_is_no_loss():
    """Ten nanoseconds may be half of a short call; they are the clock's."""
    limits = {"short": 1.15}
    assert gate.judge(limits, limits, {"short": 20e-9}, {"short": 20e-9 + 0.9 * gate.FLOOR}) == []
    assert found(gate.judge(limits, limits, {"short": 20e-9}, {"short": 20e-9 + 1.1 * gate.FLOOR})) == [
        ("loss", "short")
    ]


def test_a_gain_is_no_finding():
    assert gate.judge({"a": 1.15}, {"a"}, {"a": 2e-3}, {"a": 1e-3}) == []


def test_a_benchmark_that_vanished_fails():
    limits, figures = {"kept": 1.15, "broken": 1.15}, {"kept": 1e-3}
    base = {"kept": 1e-3, "broken": 1e-3}
    findings = gate.judge(limits, ["kept", "broken", "removed"], base, figures)
    assert found(findings) == [("vanished", "broken"), ("vanished", "removed")]
    assert gate.fails(findings)


def test_a_new_benchmark_is_noted_and_passes():
    findings = gate.judge({"old": 1.15, "new": 1.15}, ["old"], {"old": 1e-3}, {"old": 1e-3, "new": 1e-3})
    assert found(findings) == [("new", "new")]
    assert not gate.fails(findings)


def test_a_least_time_counts_as_settled_once_two_samples_agree():
    samples = {"settled": [1.3, 1.0, 1.02], "alone": [1.3, 1.0, 1.2], "only one": [1.0]}
    assert gate.unsettled(samples) == ["alone"]


class Scripted:
    """A build whose benchmark takes these seconds, one process after the other, and the last of them for good."""

    def __init__(self, *seconds):
        self._left = list(seconds)

    def sample(self, names, samples):
        for name in names:
            samples.setdefault(name, []).append(self._left.pop(0) if len(self._left) > 1 else self._left[0])


@pytest.mark.parametrize(("candidate", "verdict"), [((1.5, 1.4, 1.5, 1.5, 1.01), []), ((1.3,), [("loss", "a")])])
def test_what_looks_like_a_loss_is_measured_again(candidate, verdict):
    limits = {"a": 1.15}
    assert found(gate.judge(limits, limits, *gate.compare(Scripted(1.0), Scripted(*candidate), limits, 1))) == verdict


def test_a_function_slowed_in_its_process_is_caught(tmp_path, monkeypatch):
    """The whole way: two processes a round, one of them with a slow `encode_many`; its neighbour stays out of it."""
    monkeypatch.setattr(gate, "LOSSES_AGAIN", 1)
    package = Path(flodl_fast.__file__).parent
    sides = []
    for name, seconds in (("base", 0.010), ("slow", 0.013)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(CLOCK.format(seconds))
        sides.append(gate.Side((tmp_path / name, ROOT), package))
    limits = {"encode_many": 1.15, "round_1MiB_into": 1.15}
    findings = gate.judge(limits, limits, *gate.compare(*sides, limits, rounds=1))
    assert found(findings) == [("loss", "encode_many")]
    assert "1e+04 µs at the base, 1.3e+04 µs at the candidate" in findings[0].text
    assert gate.fails(findings)

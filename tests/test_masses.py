"""Masses, what counts as realized, and the frame ceiling."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest
import reference as ref
from conftest import golden_params

import flodl_fast as ff


def bits(value):
    return struct.pack(">d", value).hex()


MASSES = [p for p in golden_params("wire", revisions=("0.6",)) if p.values[0]["op"] == "mass"]
CEILINGS = [p for p in golden_params("wire", revisions=("0.6",)) if p.values[0]["op"] == "frame_ceiling"]


@pytest.mark.parametrize("case", MASSES)
def test_mass_vectors(case):
    assert bits(ff.gamma_mass(case["n"], case["gamma"])) == case["gamma_mass_bits"]
    assert ff.mover_mass(case["n"]) == case["mover_mass"]
    assert ff.is_realized(case["n"]) is case["realized"]


@pytest.mark.parametrize("case", CEILINGS)
def test_frame_ceiling_vectors(case):
    assert ff.frame_ceiling(case["model_bytes"]) == case["ceiling"]


def test_there_are_vectors():
    assert (len(MASSES), len(CEILINGS)) == (30, 6)


def test_generated_masses_against_the_oracle():
    rng = random.Random(31)
    for _ in range(2000):
        n = rng.choice((0.0, -0.0, -3.0, float(rng.randrange(3000)), rng.uniform(0, 1e6), 10 ** rng.uniform(-320, 308)))
        gamma = rng.choice((1.0, 0.0, -1.0, 0.5, 2.0, 400.0, -400.0, rng.uniform(-3, 3)))
        assert bits(ff.gamma_mass(n, gamma)) == bits(ref.gamma_mass(n, gamma))
        assert ff.mover_mass(n) == ref.mover_mass(n)


@pytest.mark.parametrize("gamma", [1.0, 0.0, -1.0, 0.5, 2.0, 400.0])
@pytest.mark.parametrize("n", [0, 0.0, -0.0, -1, -1e300, -math.inf])
def test_idle_work_has_mass_zero_whatever_gamma(n, gamma):
    assert bits(ff.gamma_mass(n, gamma)) == bits(0.0)
    assert bits(ff.mover_mass(n)) == bits(0.0)
    assert not ff.is_realized(n)


@pytest.mark.parametrize(("n", "gamma", "mass"), [
    (7, 1.0, 7.0), (7, 0.0, 1.0), (4, 0.5, 2.0), (4, -1.0, 0.25), (10, 2, 100.0), (1e200, 2.0, math.inf),
    (1e-200, 2.0, 0.0), (0.5, -2000.0, math.inf), (5e-324, 1.0, 5e-324), (math.inf, 0.5, math.inf),
    (math.inf, -1.0, 0.0),
])
def test_gamma_mass(n, gamma, mass):
    got = ff.gamma_mass(n, gamma)
    assert bits(got) == bits(mass)
    assert isinstance(got, float)


def test_gamma_is_one_by_default():
    assert ff.gamma_mass(12) == 12.0
    assert isinstance(ff.gamma_mass(12), float)


def test_masses_of_numpy_scalars():
    for number in (np.int64(9), np.float64(9), np.float32(9), np.uint8(9)):
        for value, right in ((ff.gamma_mass(number), 9.0), (ff.gamma_mass(number, np.float32(0.5)), 3.0),
                             (ff.mover_mass(number), 1.0)):
            assert bits(value) == bits(right)
            assert isinstance(value, float)
        assert ff.is_realized(number)


def test_realized_means_above_zero():
    for mass in (5e-324, 1.0, math.inf):
        assert ff.is_realized(mass)
        assert ff.mover_mass(mass) == 1.0
    for mass in (0.0, -0.0, -1.0, math.nan):
        assert not ff.is_realized(mass)


@pytest.mark.parametrize(("model_bytes", "ceiling"), [
    (0, 64 << 20), ((32 << 20) - 1, 64 << 20), (32 << 20, 64 << 20), ((32 << 20) + 1, (64 << 20) + 2),
    (1 << 40, 1 << 41), ((1 << 63) - 1, (1 << 64) - 2), (1 << 63, (1 << 64) - 1), ((1 << 64) - 1, (1 << 64) - 1),
])
def test_frame_ceiling(model_bytes, ceiling):
    assert ff.frame_ceiling(model_bytes) == ref.frame_ceiling(model_bytes) == ceiling


def test_a_codec_takes_the_ceiling_of_a_model():
    codec = ff.Codec(bytes(16), frame_ceiling=ff.frame_ceiling(100 << 20))
    assert codec.frame_ceiling == 200 << 20
    for impossible in (0, -1, 1 << 63, (1 << 64) - 1):
        with pytest.raises(ValueError, match="frame_ceiling"):
            ff.Codec(bytes(16), frame_ceiling=impossible)

"""The fuzzer's targets over their seeds, over damaged ones, and over every input that once broke one."""

from __future__ import annotations

import os
import random
from itertools import islice

import pytest
from generate import damage
from targets import CORPUS, TARGETS, seeds

TIMES = int(os.environ.get("FLODL_FAST_FUZZ", "1"))


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name):
    inputs = list(seeds(name))
    assert len(inputs) > 30
    for data in inputs:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_seeds(name):
    rng = random.Random(91)
    inputs = [data for data in seeds(name) if len(data) < 2000]
    for data in islice(iter(lambda: rng.choice(inputs), None), 400 * TIMES):
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = damage(rng, data) or b"\0"
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_of_every_small_size(name):
    for size in range(40):
        for fill in (0, 1, 0x7F, 0xFF):
            TARGETS[name](bytes([fill]) * size)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_the_fuzzer_found(path):
    TARGETS[path.parent.name](path.read_bytes())

"""Each row of the table, ours and the rivals', under pytest-benchmark; ``make bench`` sets them beside the crate."""

from __future__ import annotations

import pytest

from benchmarks.rows import works


@pytest.mark.parametrize("name", works())
def test_row(benchmark, name):
    benchmark.group = name.partition("/")[0]
    try:
        work = works()[name]()
    except ImportError as error:
        pytest.skip(f"the rival is not installed: {error}")
    assert work.holds(benchmark(work.function, *work.args))

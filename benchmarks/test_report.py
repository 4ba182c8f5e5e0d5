"""What the report makes of figures."""

from __future__ import annotations

import pytest

from benchmarks import report
from benchmarks.rows import Row

ROW = Row("row", "some work", None, {"crate": 4, "hashlib": 0.5}, "bench.encode_ns")


@pytest.mark.parametrize(
    ("crate", "hashlib", "said"),
    [(4.0, 0.5, "met"), (3.9, 0.5, "half"), (9.0, 0.4, "half"), (2.0, 0.25, "half"), (1.9, 9.0, "missed")],
)
def test_a_row_is_as_good_as_its_worst_goal(crate, hashlib, said):
    assert report.verdict(ROW, {"row": 1.0, "row/crate": crate, "row/hashlib": hashlib}) == said


def test_without_a_figure_there_is_no_verdict():
    best = {"row": 1.0, "row/hashlib": 1.0}
    assert report.verdict(ROW, best) == report.NONE
    assert report.ratio(ROW, "crate", best) == report.NONE


def test_figures_have_the_unit_that_fits():
    assert report.figure(ROW, 143.6e-9) == "144 ns"
    assert report.figure(ROW, 2.104e-6) == "2.1 µs"
    assert report.figure(Row("many", "", None, units=1000), 2e-3) == "2 µs a frame"
    assert report.figure(Row("big", "", None, nbytes=10**9), 0.5) == "2 GB/s"


def test_writing_changes_the_measured_part_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}old{report.END}after\n")
    for _ in range(2):
        report.write(page, "new")
    assert page.read_text() == f"before\n{report.BEGIN}\nnew\n{report.END}after\n"

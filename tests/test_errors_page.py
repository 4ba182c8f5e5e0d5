"""docs/errors.md: every class of errors has its section, and every sample there says what really comes out."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import flodl_fast as ff
from flodl_fast import errors

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
SAMPLES = "\n".join(re.findall(r"^```pycon\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))

pytestmark = pytest.mark.skipif(not TEXT, reason="the documentation is not beside the tests here")


def test_every_class_has_its_section():
    public = {name for name in ff.__all__ if isinstance(cls := getattr(ff, name), type) and issubclass(cls, Exception)}
    assert public == set(errors.__all__) == set(SECTIONS)


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"FlodlError", "DecodeError"}))
def test_a_section_has_a_sample_and_says_what_to_do(name):
    assert f"flodl_fast.errors.{name}: " in SECTIONS[name]
    assert "**What to do.**" in SECTIONS[name]


def test_the_samples_come_out_as_they_stand_there(capsys):
    samples = doctest.DocTestParser().get_doctest(SAMPLES, {}, PAGE.name, str(PAGE), 0)
    failed, tried = doctest.DocTestRunner().run(samples)
    assert failed == 0, capsys.readouterr().out
    assert tried > 30

"""Every public name says what it is, and of each parameter and attribute what it means."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flodl_fast as ff
import griffe
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTED = [
    line.removeprefix("::: ").strip()
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for line in page.read_text(encoding="utf-8").splitlines()
    if line.startswith("::: ")
]


def public(item: Any) -> Iterator[Any]:
    """An object and, of a class or module, all that is public in it, what it inherits included."""
    yield item
    if item.is_module or item.is_class:
        for name, member in item.all_members.items():
            if member.is_alias and member.inherited and member.final_target.path.split(".")[0] != "flodl_fast":
                continue
            if item.is_module and name not in (item.exports or ()):
                continue
            if not name.startswith("_"):
                yield from public(member)


@pytest.fixture(scope="module")
def package() -> Any:
    """The package as the API pages show it: sources, stubs, and the compiled modules' docstrings."""
    return griffe.load("flodl_fast", docstring_parser="google", docstring_options={"warn_missing_types": False})


def names_of(section: Any) -> list[str]:
    return [entry.name for entry in section.value]


def test_every_public_name_has_a_place_in_the_api_pages(package: Any) -> None:
    shown = {item.canonical_path for name in DOCUMENTED for item in public(package[name.removeprefix("flodl_fast.")])}
    missing = [name for name in ff.__all__ if package[name].canonical_path not in shown]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_are_there_and_match_the_signatures(package: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="griffe")
    for item in public(package[name.removeprefix("flodl_fast.")]):
        if item.is_attribute and "property" not in item.labels:
            continue
        assert item.docstring is not None, f"{item.path} has no docstring"
        sections = {section.kind: section for section in item.docstring.parsed}
        documented = sections.get(griffe.DocstringSectionKind.parameters)
        if item.is_function:
            found = [p.name for p in item.parameters if p.name not in ("self", "cls")]
            assert (names_of(documented) if documented else []) == found, item.path
        elif item.is_class and "dataclass" not in item.labels:
            init = item.all_members.get("__init__")
            found = [p.name for p in init.parameters if p.name != "self"] if init is not None and init.is_function else []
            assert (names_of(documented) if documented else []) == found, item.path
    assert not caplog.messages

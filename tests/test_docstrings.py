"""Every public name says what it is, and what each of its parameters means."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pytest

import flodl_fast as ff

API = Path(__file__).parents[1] / "docs" / "api"
PAGES = "".join(page.read_text(encoding="utf-8") for page in sorted(API.glob("*.md")))
DOCUMENTED = re.findall(r"^::: flodl_fast\.(\S+)", PAGES, re.M)
PARAMETERS = griffe.DocstringSectionKind.parameters
MADE_ELSEWHERE = {"ControlChannel", "DataChannel", "Inspection", "JoinChannel", "Plan"}  # by calls such as `connect`
TWIN = re.compile(r"As ``(channel\.[\w.]+)``")  # what the asyncio side says


@pytest.fixture(scope="module")
def package() -> Any:
    """The package as the API pages show it: sources, stubs, and the docstrings of the compiled modules."""
    options = {"warn_missing_types": False}
    folder = Path(ff.__file__).parents[1]
    return griffe.load("flodl_fast", search_paths=[folder], docstring_parser="google", docstring_options=options)


def public(item: Any) -> Iterator[Any]:
    """An object and, of a class or module, all that is public in it, what it inherits included."""
    yield item
    for name, member in item.all_members.items() if item.is_module or item.is_class else ():
        shown = name in (item.exports or ()) if item.is_module else not name.startswith("_")
        if shown and (not member.is_alias or member.final_target.path.startswith("flodl_fast.")):
            yield from public(member)


def parameters(item: Any) -> list[str]:
    """The parameters of a function, or of a class that callers make."""
    if item.is_class:
        made_by_callers = "dataclass" not in item.labels and item.name not in MADE_ELSEWHERE
        item = item.all_members.get("__init__") if made_by_callers else None
    return [p.name for p in item.parameters if p.name not in ("self", "cls")] if item and item.is_function else []


def test_every_public_name_has_a_place_in_the_api_pages(package: Any) -> None:
    shown = {item.canonical_path for name in DOCUMENTED for item in public(package[name])}
    assert [name for name in ff.__all__ if name != "aio" and package[name].canonical_path not in shown] == []


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_are_there_and_match_the_signatures(
    package: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="griffe")
    for item in public(package[name]):
        if item.is_attribute and "property" not in item.labels:
            continue
        assert item.docstring is not None, f"{item.path} has no docstring"
        twin = TWIN.match(item.docstring.value)
        if twin is None:
            documented = [p.name for s in item.docstring.parsed if s.kind is PARAMETERS for p in s.value]
        else:
            documented = parameters(package[twin[1]])
        assert documented == parameters(item), item.path
    assert not caplog.messages

"""The API reference from docstrings: without Cython's signatures and what is assigned to attributes, with links."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from markdown.extensions.toc import slugify

ROOT = Path(__file__).parents[1]
SIGNATURE = re.compile(r"\w+(\.\w+)*\(.*\)( -> .*)?\n+")
PAGE = re.compile(r"(docs/\w+\.md)((?: §\d+(?:, §\d+)*)?)")
SECTION = re.compile(r"§(\d+)")


@cache
def anchors(page: str) -> dict[str, str]:
    """The anchors of a page: under "" that of its title, the others by their sections' numbers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    sections = re.findall(r"^## ((\d+) .*)$", text, re.M)
    return {"": slugify(title, "-"), **{number: slugify(heading, "-") for heading, number in sections}}


def _linked(cited: re.Match[str]) -> str:
    """``docs/wire.md §3, §6`` as references that mkdocs-autorefs resolves, from whatever page."""
    page, sections = cited.groups()
    its = anchors(page)
    first, *more = SECTION.findall(sections) or [""]
    links = [f"[{page}{first and f' §{first}'}][{its[first]}]", *(f"[§{number}][{its[number]}]" for number in more)]
    return ", ".join(links)


class Leaner(griffe.Extension):
    """A signature stands above its docstring already; what an ``__init__`` assigns is code, not reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            line = SIGNATURE.match(obj.docstring.value)
            obj.docstring.value = PAGE.sub(_linked, obj.docstring.value[line.end() if line else 0 :])
        own = "instance-attribute" in obj.labels and "class-attribute" not in obj.labels
        if isinstance(obj, griffe.Attribute) and own:
            obj.value = None

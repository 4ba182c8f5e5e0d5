"""What mkdocs.yml cannot say: pages that stand elsewhere in the repository, and links to what is no page."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from docs_griffe import SECTION, anchors
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?:|#)[^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_from_root, text)))
    return files


def _from_root(link: re.Match[str]) -> str:
    words, target, anchor = link.groups()
    return f"[{words}]({PAGES.get(target, target.removeprefix('docs/'))}{anchor or ''})"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leave the words of links that lead out of the pages, to sources; link the wire's sections to each other."""
    if page.file.src_uri == "wire.md":
        its = anchors("docs/wire.md")
        markdown = SECTION.sub(lambda cited: f"[{cited[0]}](#{its[cited[1]]})", markdown)
    folder = dirname(page.file.src_uri)
    return LINK.sub(lambda link: link[1] if normpath(join(folder, link[2])).startswith("..") else link[0], markdown)

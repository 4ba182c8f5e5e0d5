"""Tables on standard output: drawn by rich on a terminal where it is installed, plain text everywhere else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["missing", "print_table", "rich_console", "size_text", "to_text"]

#: JSON as programs expect it: a NaN is an error here, not a word of its own.
to_text = json.JSONEncoder(allow_nan=False).encode


def rich_console() -> Any | None:
    """rich's Console for standard output; None where that is no terminal that can draw or rich is not installed."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        _hint()
        return None
    console = Console(highlight=False, soft_wrap=True)
    return None if console.is_dumb_terminal else console


@cache
def _hint() -> None:
    print("For colours and tables: pip install 'flodl_fast[cli]'", file=sys.stderr)


def missing(what: str, extra: str) -> int:
    """Say that a command needs an extra, and give its exit code."""
    print(f"{what} is not installed: pip install 'flodl_fast[{extra}]'", file=sys.stderr)
    return 2


def size_text(size: int) -> str:
    """A size in bytes as people write it: 64 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; a column whose title starts with a space is set to the right."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    right = [column.startswith(" ") for column in columns]
    names = [column.strip() for column in columns]
    console = rich_console()
    if console is not None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="cyan")
        for name, is_right in zip(names, right, strict=True):
            table.add_column(name, justify="right" if is_right else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    print(f"\n{title}")
    for row in [names, *cells]:
        line = "  ".join(
            f"{cell:{'>' if is_right else '<'}{width}}"
            for cell, is_right, width in zip(row, right, widths, strict=True)
        )
        print(f"  {line}".rstrip())

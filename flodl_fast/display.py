"""How objects show themselves: in one line each, and in a notebook as tables.

Whatever a table holds is escaped: names and texts of messages come off the network.
"""

from __future__ import annotations

import dataclasses
import html
import reprlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

__all__ = ["ROWS", "layout_table", "one_line", "plural", "table"]

ROWS = 50  # of a table, whose caption says how many there are


class _Short(reprlib.Repr):
    """Values as they show themselves, with the middle of long ones left out."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxstring = self.maxlong = 80
        self.maxother = 320  # a message within a message

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value) if len(value) <= 32 else f"<{len(value)} bytes>"

    repr_bytearray = repr_bytes


_short = _Short()


def one_line(self: Any) -> str:
    """A dataclass as it would show itself, long values abbreviated and those without a repr left out."""
    fields = (f for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(f'{f.name}={_short.repr(getattr(self, f.name))}' for f in fields)})"


def plural(number: int, thing: str) -> str:
    """1 tensor, 2 tensors."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table of the first rows."""
    lines = [f"<table><caption>{html.escape(title)}</caption>", _row("th", head)]
    lines += [_row("td", row) for row in islice(rows, ROWS)]
    return "\n".join([*lines, "</table>"])


def _row(tag: str, cells: Sequence[Any]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape('' if c is None else str(c))}</{tag}>" for c in cells) + "</tr>"


def layout_table(layout: Any) -> str:
    """A TensorLayout with a row for each tensor."""
    dtypes = np.where(layout.dtype, "bfloat16", "float32")
    shapes = (tuple(map(int, dims[:ndim])) for dims, ndim in zip(layout.shape, layout.ndim, strict=True))
    rows = zip(range(len(layout)), dtypes, shapes, layout.nbytes, layout.offset, strict=True)
    return table(repr(layout), ("tensor", "dtype", "shape", "bytes", "offset"), rows)

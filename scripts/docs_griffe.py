"""What the API reference leaves out: Cython's signatures before docstrings, and what is assigned to attributes."""

from __future__ import annotations

import re
from typing import Any

import griffe

SIGNATURE = re.compile(r"\w+(\.\w+)*\(.*\)( -> .*)?\n+")


class Leaner(griffe.Extension):
    """A signature stands above its docstring already; what an ``__init__`` assigns is code, not reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            line = SIGNATURE.match(obj.docstring.value)
            obj.docstring.value = obj.docstring.value[line.end() if line else 0 :]
        own = "instance-attribute" in obj.labels and "class-attribute" not in obj.labels
        if isinstance(obj, griffe.Attribute) and own:
            obj.value = None

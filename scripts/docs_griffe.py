"""What the API reference makes of compiled functions: Cython's signature before a docstring would stand there twice."""

from __future__ import annotations

import re
from typing import Any

import griffe

SIGNATURE = re.compile(r"\w+(\.\w+)*\(.*\)( -> .*)?\n+")


class WithoutSignatures(griffe.Extension):
    """Leaves out the first line of a docstring that is a signature."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            line = SIGNATURE.match(obj.docstring.value)
            obj.docstring.value = obj.docstring.value[line.end() if line else 0 :]

"""The examples of the README run, in order, as one program."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    scope: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    assert scope["weight"] == 1.0

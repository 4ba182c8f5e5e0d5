"""The examples of the README run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
FILES = {block.split()[1]: block for block in BLOCKS if block.startswith("# ")}


def test_the_codec_s_examples_run_in_order():
    scope: dict = {}
    plain = [block for block in BLOCKS if block not in FILES.values()]
    assert len(plain) == 3
    for block in plain:
        exec(compile(block, str(README), "exec"), scope)
    assert scope["weight"] == 1.0


def test_the_cluster_s_examples_train(tmp_path):
    assert set(FILES) == {"train.py", "local.py"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "local.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"epoch (\d)", done.stdout) == ["0", "1", "2", "3", "4"]
    # Every rank prints what the average has learnt: the numbers from 1 to 8.
    weights = [[float(n) for n in row.split()] for row in re.findall(r"\[(.*?)\]", done.stdout, re.DOTALL)]
    assert len(weights) == 3
    assert all(abs(w - (i + 1)) < 0.05 for row in weights for i, w in enumerate(row))

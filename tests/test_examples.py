"""The examples run as they stand: each a cluster of three ranks on real data."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PATIENT = {**os.environ, "FLODL_NET_TIMEOUT_SCALE": "3"}  # three interpreters that load a framework at the same time


@pytest.mark.parametrize(("name", "accuracy"), [("torch", 97.0), ("jax", 95.0)])
def test_digits(name, accuracy):
    path = EXAMPLES / f"{name}_digits.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    for needed in (name, "sklearn"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: make test-frameworks")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, env=PATIENT)
    assert done.returncode == 0, done.stdout + done.stderr
    losses, held_out = zip(*re.findall(r"loss ([\d.]+), held-out ([\d.]+)%", done.stdout), strict=True)
    assert float(losses[-1]) < float(losses[0]) / 3
    assert float(held_out[-1]) >= accuracy


RUN = """
import json, sys
import jupyter_client, nbclient, nbformat
book = nbformat.read(sys.argv[1], as_version=4)
options = {"kernel_name": "python3"}
if sys.platform != "win32":  # Ports of TCP are chosen before the kernel binds them, and may be taken by then.
    options |= {"transport": "ipc", "ip": "kernel"}
kernel = jupyter_client.AsyncKernelManager(**options)
nbclient.NotebookClient(book, timeout=300, km=kernel).execute()
print(json.dumps([cell.outputs for cell in book.cells if cell.cell_type == "code"]))
"""


def said(outputs):
    """What a cell has printed, which comes in as many pieces as the kernel likes."""
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def test_the_notebook(tmp_path):
    for needed in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install 'flodl_fast[notebook]'")
    path = EXAMPLES / "local_cluster.ipynb"
    assert all(not cell.get("outputs") for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    done = subprocess.run([sys.executable, "-c", RUN, path], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    _, run, lines, (layout,), (capture,) = json.loads(done.stdout)
    assert re.findall(r"epoch (\d)", said(run)) == ["0", "1", "2", "3", "4"]
    found = re.findall(r"\d+\.\d*", run[-1]["data"]["text/plain"])
    assert [float(weight) for weight in found] == pytest.approx(range(1, 9), abs=0.05)
    assert said(lines).startswith("LocalCluster(3 ranks, over, at 127.0.0.1:")
    assert "Worker(rank 1 of 3, 50 steps, ended by Shutdown())" in said(lines)
    assert "(784, 10)" in layout["data"]["text/html"]
    assert capture["data"]["text/html"].count("<td>ok</td>") == 5

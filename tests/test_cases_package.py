"""Public bug reports about packages that install and then fail, and that every report of the list has a test.

The numbers are those of the project's list of such cases; messages and rounds have files of their own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import SALT
from support import drawn

import flodl_fast as ff

HERE = Path(__file__).parent
CASES = 21


def test_every_case_has_a_test_that_names_it():
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("test_*.py")))
    named = {int(number) for pair in re.findall(r"def test_(\d+)_|[Cc]ase (\d+)\b", text) for number in pair if number}
    assert named >= set(range(1, CASES + 1))


# 20: brentp/cyvcf2 #307, pytoolz/cytoolz #223, capstone #2066, long2ice/asyncmy #126.


def test_20_a_build_takes_no_tool_that_miscompiles():
    path = HERE.parent / "pyproject.toml"
    needs = re.search(r"^requires = \[(.*)\]", path.read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert "!=3.1.0" in needs  # of Cython
    assert '"numpy>=2"' in needs  # what is built against NumPy 2 runs with 1.26, and not the other way about


def test_20_the_import_works_by_itself_and_says_nothing():
    code = "import flodl_fast as ff; print(ff.Codec(bytes(16)).mac(b'').hex())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, ff.Codec(bytes(16)).mac(b"").hex(), "")


def test_20_extensions_are_of_this_interpreter():
    from flodl_fast import _codec, _round

    for module in (_codec, _round):
        assert module.__file__.endswith(sysconfig.get_config_var("EXT_SUFFIX"))


def test_20_eight_threads_with_decoders_of_their_own_agree_with_one():
    messages = drawn(20, 300, entries=3)
    stream = ff.Codec(SALT).encode_many(messages)

    def work(_):
        return {ff.Codec(SALT).encode_many(ff.Codec(SALT).decode_many(stream)[0]) for _ in range(20)}

    with ThreadPoolExecutor(8) as pool:
        assert set.union(*pool.map(work, range(8))) == {stream}


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this CPython is not free-threaded")
def test_20_support_for_free_threading_is_declared_only_where_it_is_shown():
    """Not yet: the import brings the GIL back, and says so."""
    code = "import warnings; warnings.simplefilter('ignore'); import sys, flodl_fast; print(sys._is_gil_enabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"

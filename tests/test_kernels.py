"""Every kernel that this CPU can run, through the package and on its own.

The checks of this module's first half hold for the kernels in use. A fresh interpreter runs them again for every other
kernel, which an environment variable chooses at import.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import random
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from conftest import SALT, golden
from round_support import CODEC, CODEC7, halves, narrowed, noise, run_python, widened, words

import flodl_fast as ff
from flodl_fast import _codec, _round

NATIVE = Path(__file__).parents[1] / "flodl_fast" / "_native"
CHECKS = Path(__file__).parent / "native" / "check_kernels.c"

# SHA-256 -------------------------------------------------------------------------------------------------


def tag(salt, data):
    """The first 8 bytes of HMAC-SHA256 by hashlib alone."""
    key = salt.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + data).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()[:8]


def check_every_length():
    rng = random.Random(41)
    data = rng.randbytes(301)
    for size in range(301):
        assert CODEC.mac(data[:size]) == tag(SALT, data[:size]) == hmac.digest(SALT, data[:size], "sha256")[:8]


def check_every_alignment():
    rng = random.Random(42)
    whole = memoryview(bytearray(rng.randbytes(64 + 300)))
    for offset in range(64):
        for size in (*range(offset % 8, 300, 8), 63, 64, 65, 119, 120, 128):
            part = whole[offset:offset + size]
            assert CODEC.mac(part) == hmac.digest(SALT, part, "sha256")[:8]


def check_random_lengths_and_salts():
    rng = random.Random(43)
    pool = rng.randbytes(1 << 20)
    for _ in range(400):
        salt, size, offset = rng.randbytes(16), int(2 ** rng.uniform(0, 19)), rng.randrange(1 << 19)
        part = memoryview(pool)[offset:offset + size]
        assert ff.Codec(salt).mac(part) == hmac.digest(salt, part, "sha256")[:8]
    assert CODEC.mac(pool) == hmac.digest(SALT, pool, "sha256")[:8]


def check_streams():
    # A round frame is signed block by block while it is written, and checked in one piece.
    for size in (0, 1, 8, 9, 10, 8000, 8190, 8200, 16_380, 16_390, 100_000):
        for tensors in ([noise(1, size)], [noise(i, size // 7) for i in range(7)]):
            raw = CODEC.encode_round(ff.RoundFrame(tensors, weight=1.0))
            assert raw[-8:] == hmac.digest(SALT, raw[:-8], "sha256")[:8]
            assert [words(t) for t in CODEC.decode_round(raw).tensors] == [words(t) for t in tensors]
    for size in (0, 1, 46, 47, 48, 55, 56, 64, 1000, 70_000):
        payload = random.Random(size).randbytes(size)
        raw = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.HOST_FRAME, 0, payload))
        assert raw[17:25] == hmac.digest(SALT, raw[:17] + payload, "sha256")[:8]
        assert CODEC.decode_mux(raw).payload == payload


def check_pairs():
    # Many frames are signed and checked two at a time.
    rng = random.Random(44)
    messages = [ff.DashboardSetMetadata(i, "x" * rng.choice((0, 1, 30, 31, 32, 95, 96, 300))) for i in range(201)]
    for part in (messages, messages[:200], messages[:1]):
        assert CODEC.encode_many(part) == b"".join(CODEC.encode(message) for message in part)
        assert CODEC.decode_many(CODEC.encode_many(part))[0] == part


# float32 and bfloat16 ------------------------------------------------------------------------------------


def plain(array):
    """An array's bits, every NaN alike."""
    return words(np.where(array == array, array, np.float32(math.nan)))


def at_offset(array, offset):
    """The same array `offset` bytes after a 64-byte boundary."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    placed = memory[start:start + array.nbytes].view("<f4")
    placed[...] = array
    return placed


def check_fold():
    for count in (1, 2, 3, 4, 5, 12, 13, 25):
        for size in (*range(0, 140, 3 if count > 2 else 1), 4097, 8192, 8193, 65_536, 65_543):
            if size > 9000 and count not in (2, 13):
                continue
            arrays = [at_offset(noise(1000 * i + size, size), (i + size) % 64) for i in range(count)]
            total = np.zeros(size, np.float32)
            with np.errstate(all="ignore"):
                for array in arrays:
                    total = total + array
                mean = total * np.float32(1 / (0.75 * count))
            frames = [ff.RoundFrame([array], weight=0.75) for array in arrays]
            assert plain(ff.sum_frames(frames).tensors[0]) == plain(total)
            assert plain(ff.reduce_frames(frames).tensors[0]) == plain(mean)


def check_first_nonfinite():
    for size in (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 200):
        array = at_offset(np.linspace(-3e38, 3e38, size, dtype=np.float32), size % 64)
        assert _round.first_nonfinite(array) is None
        for at in range(size):
            for value in (math.nan, math.inf, -math.inf):
                kept, array[at] = array[at], value
                assert str(_round.first_nonfinite(array)) == str((at, value))
                array[at] = kept


def check_copies():
    # Into arrays at every alignment, small and so large that the caches are passed by.
    for size in (*range(70), 2000, 100_000):
        for offset in ({0, 1, 4, 31, 32, 60, 63} if size > 69 else {size % 64, 63 - size % 64}):
            array = noise(size, size)
            raw = CODEC.encode_round(ff.RoundFrame([at_offset(array, offset)]))
            into = at_offset(np.zeros(size, np.float32), 63 - offset)
            CODEC.decode_round(raw, out=[into])
            assert words(into) == words(array)


def check_bfloat16():
    for size in (*range(70), 2047, 2048, 2049, 8192, 70_001):
        single, half = at_offset(noise(size, size), size % 64), halves(size, size)
        raw = CODEC7.encode_round(ff.RoundFrame([single]), wire="bf16")
        assert words(CODEC7.decode_round(raw).tensors[0]) == words(narrowed(single))
        into = at_offset(np.zeros(size, np.float32), 63 - size % 64)
        CODEC7.decode_round(CODEC7.encode_round(ff.RoundFrame([half])), out=[into])
        assert words(into) == words(widened(half))
        with np.errstate(all="ignore"):
            total = narrowed(np.float32(0) + widened(half) + widened(half) + widened(half))
            mean = narrowed(widened(total) * np.float32(1 / 1.5))
        frames = [ff.RoundFrame([half], weight=0.5)] * 3
        assert plain(widened(ff.sum_frames(frames).tensors[0])) == plain(widened(total))
        assert plain(widened(ff.reduce_frames(frames).tensors[0])) == plain(widened(mean))


def check_lanes():
    # Many short frames are checked up to sixteen at a time; one that is wrong is found at its place.
    for count in (12, 13, 15, 16, 17, 29, 32, 33, 50):
        messages = [ff.Heartbeat(i % 8, 1 << i % 32) for i in range(count)]
        frames = [CODEC.encode(message) for message in messages]
        assert CODEC.decode_many(b"".join(frames)) == (messages, sum(map(len, frames)))
        for place in range(count):
            changed = frames[place][:-1] + bytes([frames[place][-1] ^ 1])
            later = [changed] * (count - place)
            with pytest.raises(ff.AuthenticationError) as caught:
                CODEC.decode_many(b"".join(frames[:place] + later))
            assert caught.value.decoded == messages[:place]
            assert caught.value.offset == sum(map(len, frames[:place]))


CHECK_SHA256 = [
    check_every_length, check_every_alignment, check_random_lengths_and_salts, check_streams, check_pairs, check_lanes,
]  # fmt: skip
CHECK_FOLD = [check_fold, check_first_nonfinite, check_copies, check_bfloat16]


@pytest.mark.parametrize("check", CHECK_SHA256 + CHECK_FOLD, ids=lambda check: check.__name__)
def test_kernels_in_use(check):
    check()


def test_hmac_vectors():
    cases = [case for case in golden("wire") if case["op"] == "hmac"]
    assert cases
    for case in cases:
        assert ff.Codec(case["salt"]).mac(bytes.fromhex(case["bytes"])).hex() == case["tag"]


# The choice ----------------------------------------------------------------------------------------------

CHOICES = {"FLODL_FAST_SHA256": _codec.sha256_kernel, "FLODL_FAST_FOLD": _round.fold_kernel}
REPORT = """
import sys
from test_kernels import CHECK_FOLD, CHECK_SHA256, _codec, _round
for check in {checks}:
    check()
print(_codec.sha256_kernel()[0], _round.fold_kernel()[0])
"""


@pytest.mark.parametrize("sha256", _codec.sha256_kernel()[1])
def test_each_sha256_kernel(sha256):
    done = run_python(REPORT.format(checks="CHECK_SHA256"), FLODL_FAST_SHA256=sha256)
    assert (done.returncode, done.stdout.split()[:1]) == (0, [sha256]), done.stderr


@pytest.mark.parametrize("fold", _round.fold_kernel()[1])
def test_each_fold_kernel(fold):
    done = run_python(REPORT.format(checks="CHECK_FOLD"), FLODL_FAST_FOLD=fold)
    assert (done.returncode, done.stdout.split()[1:]) == (0, [fold]), done.stderr


def test_without_a_choice_the_best_is_in_use():
    done = run_python(REPORT.format(checks="()"), FLODL_FAST_SHA256="", FLODL_FAST_FOLD="")
    assert (done.returncode, done.stdout.split()) == (0, [kernel()[1][0] for kernel in CHOICES.values()]), done.stderr
    for kernel in CHOICES.values():
        assert kernel()[1][-1] == "portable"


@pytest.mark.parametrize("variable", CHOICES)
@pytest.mark.parametrize("name", ["none", "Portable", "portable,", "portable\n", "é"])
def test_an_unknown_kernel_is_an_import_error_that_lists_those_there_are(variable, name):
    done = run_python("""
try:
    import flodl_fast
except ImportError as error:
    print(error)
""", **{variable: name})
    assert done.returncode == 0, done.stderr
    assert f"{variable}={name!r}" in done.stdout
    assert ",".join(CHOICES[variable]()[1]) in done.stdout


# The kernels on their own --------------------------------------------------------------------------------


def test_the_checks_in_c(tmp_path):
    names = [(sysconfig.get_config_var("CC") or "cc").split()[0], "cc", "gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        pytest.skip("the checks are compiled by a C compiler, and none is installed")
    if not NATIVE.exists():
        pytest.skip("the kernels' sources are not beside these tests")
    program = tmp_path / "check_kernels"
    sources = [str(path) for path in (CHECKS, *sorted(NATIVE.glob("*.c")))]
    subprocess.run([compiler, "-O2", "-ffp-contract=off", f"-I{NATIVE}", "-o", str(program), *sources], check=True)
    named = {name for kernel in CHOICES.values() for name in kernel()[1]}
    done = subprocess.run([str(program), *named], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["0", "failures"]), done.stdout

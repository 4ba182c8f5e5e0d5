"""What the tests of round frames share: the oracle's form and back, forged frames, all ways to decode."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference as ref
from conftest import SALT

import flodl_fast as ff

CODEC = ff.Codec(SALT)
HERE = Path(__file__).parent

# Resident memory is what Linux's /proc/self tells; a sanitizer's allocator keeps what is freed.
measures_memory = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="resident memory is measured on Linux, without sanitizers",
)


def words(array: Any) -> bytes:
    """An array's elements in C order as little-endian bytes, bit for bit."""
    array = np.asarray(array)
    return np.frombuffer(array.tobytes(), array.dtype.str.replace("f", "u")).astype("<u4").tobytes()


def tensor_of(form: Any) -> np.ndarray:
    """The array of one of the oracle's tensors."""
    return np.frombuffer(bytes.fromhex(form["bytes"]), "<f4").reshape(form["shape"])


def frame_of(form: Any) -> ff.RoundFrame:
    """The package's frame of one in the oracle's form."""
    tensors = [tensor_of(tensor) for tensor in form["tensors"]]
    return ff.RoundFrame(tensors, ff.RoundKind[form["kind"].upper()], form["weight"])


def form_of(frame: ff.RoundFrame) -> Any:
    """The oracle's form of a frame."""
    tensors = [{"dtype": 0, "shape": list(t.shape), "bytes": words(t).hex()} for t in frame.tensors]
    return {"kind": frame.kind.name.title(), "weight": frame.weight, "tensors": tensors}


def wire(tensors: Any, kind: str = "Model", weight: float = 0.0) -> bytes:
    """The oracle's bytes of the frame of these native arrays."""
    forms = [{"dtype": 0, "shape": list(np.shape(t)), "bytes": words(t).hex()} for t in tensors]
    return ref.encode_round(SALT, {"kind": kind, "weight": weight, "tensors": forms})


def numpy_holds(shape: Any) -> bool:
    """Whether this NumPy can have an array of that shape, which has few elements or none."""
    try:
        np.empty(shape, np.float32)
    except ValueError:
        return False
    return True


class Forged(NamedTuple):
    """A tensor of a forged frame, true or not."""

    shape: tuple[int, ...]
    data: bytes = b""
    dtype: int = 0
    nbytes: int | None = None


def forge(
    *tensors: Forged, magic: int = ref.ROUND_FRAME, count: int | None = None, kind: int = 0, weight: float = 1.0
) -> bytes:
    """A round frame whose MAC holds, whatever it says."""
    parts = [struct.pack("<IIBd", magic, len(tensors) if count is None else count, kind, weight)]
    for shape, data, dtype, nbytes in tensors:
        size = len(data) if nbytes is None else nbytes
        parts += struct.pack(f"<BB{len(shape)}IQ", dtype, len(shape), *shape, size), data
    signed = b"".join(parts)
    return signed + ref.mac8(SALT, signed)


def numbers(*shape: int, start: float = 1.0) -> np.ndarray:
    """A float32 array of that shape whose elements all differ."""
    return np.arange(start, start + math.prod(shape), dtype=np.float32).reshape(shape)


def noise(seed: int, *shape: int) -> np.ndarray:
    """A float32 array of that shape, NaN with payloads, the infinities, zeros of both signs and subnormals among it."""
    rng = np.random.default_rng(seed)
    array = rng.standard_normal(shape, np.float32)
    special = np.array(
        [0x7FC00000, 0x7F800001, 0xFFADBEEF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x807FFFFF], np.uint32
    )
    bits = array.reshape(-1).view(np.uint32)
    at = rng.integers(0, max(bits.size, 1), bits.size // 4)
    bits[at] = rng.choice(special, at.size)
    return array


# Every way to decode a frame, as functions of bytes and the arrays to decode into, where a way takes any.
Decode = Callable[[Any, list[np.ndarray]], Any]
WAYS: dict[str, Decode] = {
    "copy": lambda data, into, **options: CODEC.decode_round(data, **options),
    "view": lambda data, into, **options: CODEC.decode_round(data, copy=False, **options),
    "out": lambda data, into, **options: CODEC.decode_round(data, out=into, **options),
    "layout": lambda data, into: ff.TensorLayout.from_frame(CODEC, data),
    "decode_into": lambda data, into, **options: ff.TensorLayout.of(into).decode_into(CODEC, data, into, **options),
}


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees these modules; `env` is added to the environment."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        check=False,
    )

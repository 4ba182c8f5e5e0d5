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

import ml_dtypes
import numpy as np
import pytest
import reference as ref
from conftest import SALT

import flodl_fast as ff

CODEC = ff.Codec(SALT)
CODEC7, CODEC8 = ff.Codec(SALT, "0.7"), ff.Codec(SALT, "0.8")
BF16 = np.dtype(ml_dtypes.bfloat16)
HERE = Path(__file__).parent

# Resident memory is what Linux's /proc/self tells; a sanitizer's allocator keeps what is freed.
measures_memory = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="resident memory is measured on Linux, without sanitizers",
)


def words(array: Any) -> bytes:
    """An array's elements in C order as little-endian bytes, bit for bit."""
    array = np.asarray(array)
    word = np.dtype(f"u{array.itemsize}")
    held = np.frombuffer(array.tobytes(), word.newbyteorder(array.dtype.byteorder))
    return held.astype(word.newbyteorder("<")).tobytes()


def tensor_of(form: Any) -> Any:
    """The array of one of the oracle's tensors, or its Elided."""
    if not form["bytes"] and math.prod(form["shape"]):
        return ff.Elided(tuple(form["shape"]), "bf16" if form["dtype"] else "f32")
    data = bytes.fromhex(form["bytes"])
    values = np.frombuffer(data, "<u2").view(BF16) if form["dtype"] else np.frombuffer(data, "<f4")
    return values.reshape(form["shape"])


def tensor_form(tensor: Any) -> Any:
    """The oracle's form of a tensor."""
    if isinstance(tensor, ff.Elided):
        return {"dtype": int(tensor.dtype == "bf16"), "shape": list(tensor.shape), "bytes": ""}
    return {"dtype": int(tensor.dtype == BF16), "shape": list(tensor.shape), "bytes": words(tensor).hex()}


def frame_of(form: Any) -> ff.RoundFrame:
    """The package's frame of one in the oracle's form."""
    tensors = [tensor_of(tensor) for tensor in form["tensors"]]
    return ff.RoundFrame(tensors, ff.RoundKind[form["kind"].upper()], form["weight"])


def form_of(frame: ff.RoundFrame) -> Any:
    """The oracle's form of a frame."""
    tensors = [tensor_form(tensor) for tensor in frame.tensors]
    return {"kind": frame.kind.name.title(), "weight": frame.weight, "tensors": tensors}


def wire(tensors: Any, kind: str = "Model", weight: float = 0.0, revision: str = "0.6") -> bytes:
    """The oracle's bytes of the frame of these native arrays, or Elided."""
    forms = [tensor_form(tensor) for tensor in tensors]
    return ref.encode_round(SALT, {"kind": kind, "weight": weight, "tensors": forms}, revision)


def zeros_of(form: Any) -> Any:
    """A frame in the oracle's form with the zeros of what is elided."""
    tensors = [
        {**t, "bytes": t["bytes"] or "00" * ((2 if t["dtype"] else 4) * math.prod(t["shape"]))} for t in form["tensors"]
    ]
    return {**form, "tensors": tensors}


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


def halves(seed: int, *shape: int) -> np.ndarray:
    """A bfloat16 array of that shape, the upper halves of such noise."""
    return (noise(seed, *shape).view(np.uint32) >> 16).astype(np.uint16).view(BF16)


def narrowed(array: Any) -> np.ndarray:
    """A float32 array's values rounded to bfloat16 (docs/wire.md §9)."""
    bits = np.asarray(array, np.float32).view(np.uint32).astype(np.int64)  # which NumPy 1 mixes with a Python int
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, bits >> 16 | 0x40, rounded).astype(np.uint16).view(BF16)


def widened(array: Any) -> np.ndarray:
    """A bfloat16 array's values in float32."""
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


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

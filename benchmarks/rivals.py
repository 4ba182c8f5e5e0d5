"""The same work done with other libraries, as a user who minds speed would write it.

Where flodl_fast signs, they sign with ``hmac.digest``, and where it checks, they check. Tag and body stay two
objects, which spares them a copy. Each function makes the Work of one row; the libraries are imported by those that
use them, so that a missing one costs its own figures only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, get_type_hints

import numpy as np

from .clock import Work

KEY = b"\x42" * 16  # the crate's bench signs with it


def _sealed(body: Any) -> tuple[bytes, Any]:
    return hmac.digest(KEY, body, "sha256")[:8], body


def _opened(frame: tuple[bytes, Any]) -> Any:
    tag, body = frame
    if not hmac.compare_digest(hmac.digest(KEY, body, "sha256")[:8], tag):
        raise ValueError("the tag does not hold")
    return body


# -- msgspec: MessagePack of Structs with a message's fields, as arrays


class _Msgspec:
    def __init__(self, message: Any):
        import msgspec

        kind = type(message)
        fields = get_type_hints(kind)
        # Untracked where only numbers are held, as flodl_fast's messages are.
        numbers = not any(isinstance(getattr(message, name), (list, dict)) for name in fields)
        self.struct = msgspec.defstruct(kind.__name__, list(fields.items()), array_like=True, gc=not numbers)
        self.fields = tuple(fields)
        self.encoder, self.decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(self.struct)

    def of(self, message: Any) -> Any:
        return self.struct(*(getattr(message, name) for name in self.fields))

    def encode(self, struct: Any) -> tuple[bytes, bytes]:
        return _sealed(self.encoder.encode(struct))

    def decode(self, frame: tuple[bytes, bytes]) -> Any:
        return self.decoder.decode(_opened(frame))

    def encode_many(self, structs: list[Any]) -> list[tuple[bytes, bytes]]:
        return [self.encode(struct) for struct in structs]

    def decode_many(self, frames: list[tuple[bytes, bytes]]) -> list[Any]:
        return [self.decode(frame) for frame in frames]


def msgspec_encode(message: Any) -> Work:
    lib = _Msgspec(message)
    struct = lib.of(message)
    return Work(lambda frame: lib.decode(frame) == struct, lib.encode, (struct,))


def msgspec_decode(message: Any) -> Work:
    lib = _Msgspec(message)
    struct = lib.of(message)
    return Work(lambda got: got == struct, lib.decode, (lib.encode(struct),))


def msgspec_encode_many(messages: Sequence[Any]) -> Work:
    lib = _Msgspec(messages[0])
    structs = [lib.of(message) for message in messages]
    return Work(lambda frames: lib.decode_many(frames) == structs, lib.encode_many, (structs,))


def msgspec_decode_many(messages: Sequence[Any]) -> Work:
    lib = _Msgspec(messages[0])
    structs = [lib.of(message) for message in messages]
    return Work(lambda got: got == structs, lib.decode_many, (lib.encode_many(structs),))


# -- tensors


def _alike(arrays: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(arrays, others, strict=True))


def _safetensors_save(arrays: Sequence[np.ndarray]) -> tuple[bytes, bytes]:
    from safetensors.numpy import save

    return _sealed(save({str(i): array for i, array in enumerate(arrays)}))


def _safetensors_load(frame: tuple[bytes, bytes], out: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    from safetensors.numpy import load

    loaded = load(_opened(frame))
    for i, array in enumerate(out):
        np.copyto(array, loaded[str(i)])
    return out


def safetensors_encode(arrays: Sequence[np.ndarray]) -> Work:
    out = [np.zeros_like(array) for array in arrays]
    return Work(lambda frame: _alike(_safetensors_load(frame, out), arrays), _safetensors_save, (arrays,))


def safetensors_decode(arrays: Sequence[np.ndarray]) -> Work:
    frame, out = _safetensors_save(arrays), [np.ones_like(array) for array in arrays]
    return Work(lambda got: _alike(got, arrays), _safetensors_load, (frame, out))


class _Arrow:
    """Arrow's IPC form of tensors, one after the other in a kept buffer."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        import pyarrow

        self.pa = pyarrow
        self.arrays = arrays
        size = sum(pyarrow.ipc.get_tensor_size(pyarrow.Tensor.from_numpy(array)) for array in arrays)
        self.kept = np.ones(size + 64 * len(arrays), np.uint8)
        self.out = [np.ones_like(array) for array in arrays]

    def write(self) -> tuple[bytes, memoryview]:
        sink = self.pa.FixedSizeBufferWriter(self.pa.py_buffer(self.kept))
        for array in self.arrays:
            self.pa.ipc.write_tensor(self.pa.Tensor.from_numpy(array), sink)
        return _sealed(memoryview(self.kept)[: sink.tell()])

    def read(self, frame: tuple[bytes, memoryview]) -> Sequence[np.ndarray]:
        source = self.pa.BufferReader(_opened(frame))
        for array in self.out:
            np.copyto(array, self.pa.ipc.read_tensor(source).to_numpy())
        return self.out


def arrow_encode(arrays: Sequence[np.ndarray]) -> Work:
    lib = _Arrow(arrays)
    return Work(lambda frame: _alike(lib.read(frame), arrays), lib.write)


def arrow_decode(arrays: Sequence[np.ndarray]) -> Work:
    lib = _Arrow(arrays)
    return Work(lambda got: _alike(got, arrays), lib.read, (lib.write(),))


def numpy_sum(arrays: Sequence[np.ndarray]) -> Work:
    def fold() -> np.ndarray:
        if len(arrays) == 1:
            return arrays[0].copy()
        total = arrays[0] + arrays[1]
        for array in arrays[2:]:
            total += array
        return total

    return Work(lambda total: np.array_equal(total, sum(arrays)), fold)


# -- the machine: bytes hashed, bytes copied


def hashlib_digest(nbytes: int) -> Work:
    data = np.ones(nbytes, np.uint8)
    return Work(lambda digest: len(digest) == 32, lambda: hashlib.sha256(data).digest())


def memcpy(nbytes: int) -> Work:
    data, copy = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return Work(lambda _: np.array_equal(data, copy), np.copyto, (copy, data))

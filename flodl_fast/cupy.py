"""CUDA arrays of any library, by way of CuPy; those of PyTorch go their own way (docs/frameworks.md)."""
# Without CuPy a type checker takes this file for it.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

try:
    import cupy
except ModuleNotFoundError as error:
    raise ImportError(f"CUDA arrays are copied by CuPy ({error}): install the cupy package of your CUDA") from error

from .model import Lane, Slot

__all__: list[str] = []


def lane_of(tensor: Any) -> Lane:
    """How a CUDA array is staged.

    Raises:
        TypeError: one that is not float32 or cannot be viewed by CuPy.
    """
    array = _view(tensor)
    if array.dtype != np.float32:
        raise TypeError(f"expected float32, got {array.dtype}")
    return _cuda(array.device.id)


def _view(tensor: Any) -> Any:
    """The CuPy array on the same memory."""
    interface = hasattr(tensor, "__cuda_array_interface__")
    return cupy.asarray(tensor) if interface else cupy.from_dlpack(tensor)


class _Cuda:
    """Copies through pinned memory on a stream of their own, beside the caller's kernels and the host's work."""

    def __init__(self, device: int) -> None:
        self._device = device
        with cupy.cuda.Device(device):
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def slot(self, tensor: Any) -> Slot:
        view = _view(tensor)
        memory = cupy.cuda.alloc_pinned_memory(max(view.nbytes, 1))
        return Slot(view, memory, np.frombuffer(memory, np.float32, view.size).reshape(view.shape))

    def begin(self) -> None:
        self._follow(self._stream, cupy.cuda.get_current_stream(self._device))

    def down(self, slot: Slot) -> None:
        with cupy.cuda.Device(self._device), self._stream:
            slot.tensor.get(stream=self._stream, out=slot.array, blocking=False)

    def up(self, slot: Slot) -> None:
        with cupy.cuda.Device(self._device), self._stream:
            dense = slot.tensor if slot.tensor.flags.c_contiguous else cupy.empty(slot.array.shape, np.float32)
            dense.set(slot.array, self._stream)
            if dense is not slot.tensor:
                slot.tensor[...] = dense

    def mark(self) -> Callable[[], object]:
        done: Callable[[], object] = self._stream.record().synchronize
        return done

    def end(self) -> None:
        self._follow(cupy.cuda.get_current_stream(self._device), self._stream)

    def squares(self, tensors: Sequence[Any]) -> float:
        with cupy.cuda.Device(self._device):
            return float(sum(cupy.square(tensor).sum(dtype=np.float64) for tensor in tensors))

    @staticmethod
    def _follow(later: Any, earlier: Any) -> None:
        """Let what ``later`` is given from now on wait for what ``earlier`` was given up to now."""
        later.wait_event(earlier.record())


_cuda = cache(_Cuda)

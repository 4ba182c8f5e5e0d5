"""PyTorch modules as models of a worker (docs/frameworks.md)."""
# Without PyTorch a type checker takes this file for it.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError(f"flodl_fast.torch needs PyTorch ({error}): pip install 'flodl_fast[torch]'") from error

from . import model
from .model import Lane, Slot, Tensors, check_apart
from .signature import sig_or_why

__all__ = ["Model"]

_HALF = (torch.float16, torch.bfloat16)


class Model(model.Model):
    """A module's parameters and float32 buffers.

    float32 tensors on the CPU are shared: the worker averages their very memory. Others are staged: copied to the host
    for an average and, under ``no_grad``, back in place; on CUDA through pinned memory on a stream of their own. The
    tensors stay the module's, with their strides, their ``requires_grad`` and their place in an optimiser; one that the
    module has under several names is averaged once. Buffers of other dtypes stay local.

    Args:
        module: the module, on its device already.
        widen: take parameters of half precision, too: float16 and bfloat16 are widened to float32 on the way out, which
            is exact, and averages rounded on the way back.

    Raises:
        TypeError: a parameter that is not float32, nor of half precision under ``widen``.
        ValueError: two tensors that are shared with the worker, and memory with each other.
    """

    def __init__(self, module: torch.nn.Module, *, widen: bool = False) -> None:
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        lane = partial(lane_of, widen=widen)
        for name, tensor in params.items():
            try:
                lane(tensor)
            except TypeError as error:
                raise TypeError(f"parameter {name}: {error}") from None
        super().__init__(
            Tensors("params", params.values(), lane),
            Tensors("buffers", [b for b in buffers.values() if b.dtype == torch.float32]),
            sig_or_why(params, buffers),
        )
        check_apart(self.params, self.buffers)


def lane_of(tensor: torch.Tensor, *, widen: bool = False) -> Lane | None:
    """How a tensor is staged, half precision only to ``widen`` it; None where its memory is shared.

    Raises:
        TypeError: a tensor of another dtype.
    """
    if tensor.dtype != torch.float32 and not (widen and tensor.dtype in _HALF):
        name = str(tensor.dtype).rpartition(".")[2]
        hint = "; flodl_fast.torch.Model(module, widen=True) takes it" if tensor.dtype in _HALF else ""
        raise TypeError(f"expected float32, got {name}{hint}")
    if tensor.is_cuda:
        return _cuda(tensor.device)
    return None if tensor.device.type == "cpu" and tensor.dtype == torch.float32 else _BLOCKING


class _Blocking:
    """Copies that are done when they return: of half precision on the CPU, and of devices other than CUDA's."""

    pinned = False

    def slot(self, tensor: torch.Tensor) -> Slot:
        host = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=self.pinned)
        return Slot(tensor, host, host.numpy())

    def begin(self) -> None:
        pass

    def down(self, slot: Slot) -> None:
        self._copy(slot.host, slot.tensor)

    def up(self, slot: Slot) -> None:
        self._copy(slot.tensor, slot.host)

    def mark(self) -> Callable[[], object]:
        return lambda: None

    def end(self) -> None:
        pass

    def squares(self, tensors: Sequence[torch.Tensor]) -> float:
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
            return float(torch.stack(norms).cpu().double().square().sum())

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad(), self._running():
            to.copy_(source, non_blocking=self.pinned)

    def _running(self) -> AbstractContextManager[Any]:
        return nullcontext()


class _Cuda(_Blocking):
    """Copies through pinned memory on a stream of their own, beside the caller's kernels and the host's work."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Callable[[], object]:
        event = torch.cuda.Event(blocking=True)  # a thread that waits leaves the core to others
        event.record(self._stream)
        done: Callable[[], object] = event.synchronize
        return done

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _running(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream


_BLOCKING = _Blocking()
_cuda = cache(_Cuda)

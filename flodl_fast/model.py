"""What a worker averages: the caller's tensors, wherever they are, as float32 arrays on the host (docs/frameworks.md).

A tensor whose memory the host can write as float32 is shared: its array is that memory. Any other is staged: its array
is host memory of its own, and a Lane copies between the two while the worker signs, sends and waits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ._round import arrays_of
from .display import plural
from .signature import dtype_name, sig_or_why

__all__ = ["Arrays", "Lane", "Model", "Slot", "Tensors", "check_apart", "norm"]

Arrays = tuple[NDArray[np.float32], ...]

BLOCK = 1 << 16  # values per block of a norm: few enough to stay in the cache
CUDA = (2, 13)  # DLPack's device types of CUDA: its own memory, and managed


@dataclass(frozen=True, slots=True)
class Slot:
    """A staged tensor.

    Attributes:
        tensor: the caller's.
        host: the host memory that copies go to and come from, as its framework wants it.
        array: the same memory as a float32 array.
    """

    tensor: Any
    host: Any
    array: np.ndarray


class Lane(Protocol):
    """Copies between the tensors of one device and the host, which run in the order in which they are begun."""

    def slot(self, tensor: Any) -> Slot:
        """Host memory for a tensor, pinned where that makes copies faster."""
        ...

    def begin(self) -> None:
        """Let later copies wait for all that the caller has given the device up to now."""
        ...

    def down(self, slot: Slot) -> None:
        """Begin to copy a tensor to the host."""
        ...

    def up(self, slot: Slot) -> None:
        """Begin to copy the host's values to a tensor."""
        ...

    def mark(self) -> Callable[[], object]:
        """What waits on the host for the copies begun up to now."""
        ...

    def end(self) -> None:
        """Let all that the caller gives the device from now on wait for the copies begun up to now."""
        ...

    def squares(self, tensors: Sequence[Any]) -> float:
        """The sum of the squares of all values of these tensors, computed where they are."""
        ...


def lane_of(tensor: Any) -> Lane | None:
    """How a tensor is staged; None where its memory can be shared.

    Raises:
        ImportError: CUDA memory of another library than PyTorch, without CuPy to copy it.
        TypeError: a PyTorch tensor that is not float32.
    """
    if isinstance(tensor, np.ndarray):
        return None
    pytorch = sys.modules.get("torch")
    if pytorch is not None and isinstance(tensor, pytorch.Tensor):
        from . import torch

        return torch.lane_of(tensor)
    if hasattr(tensor, "__cuda_array_interface__") or _dlpack_device(tensor) in CUDA:
        from . import cupy

        return cupy.lane_of(tensor)
    return None


def _dlpack_device(tensor: Any) -> int | None:
    return int(tensor.__dlpack_device__()[0]) if hasattr(tensor, "__dlpack_device__") else None


class Tensors:
    """Tensors of the caller's as float32 arrays on the host.

    Args:
        what: what to call them in an error.
        tensors: the tensors.
        lane_of: says of each how it is staged.
        names: the tensors' names, for errors; of as many as have one.

    Raises:
        TypeError: a tensor that is not float32, not writable, or without memory to share.
    """

    def __init__(
        self,
        what: str,
        tensors: Iterable[Any],
        lane_of: Callable[[Any], Lane | None] = lane_of,
        names: Sequence[str] = (),
    ) -> None:
        if hasattr(tensors, "__dlpack__"):
            raise TypeError(
                f"{what}: expected several tensors, got one {type(tensors).__name__}: give a mapping of its name to it"
            )

        def tell(i: int) -> str:
            return f"{what}: tensor {i} ({names[i]!r})" if i < len(names) else f"{what}: tensor {i}"

        self._what = what
        self._slots: dict[int, tuple[Lane, Slot]] = {}
        self._shared: dict[int, Any] = {}  # of PyTorch, which can give a tensor other memory
        memories = []
        for i, tensor in enumerate(tensors):
            try:
                lane = lane_of(tensor)
                if lane is not None:
                    self._slots[i] = lane, lane.slot(tensor)
                    tensor = self._slots[i][1].array
                elif hasattr(tensor, "detach"):
                    self._shared[i] = tensor
                    tensor = tensor.detach().numpy()
            except TypeError as error:
                raise TypeError(f"{tell(i)}: {error}") from None
            memories.append(tensor)
        for i, memory in enumerate(memories):  # A frame may hold bfloat16 as well, a worker's arrays may not.
            if hasattr(memory, "dtype") and dtype_name(memory) != "float32":
                raise TypeError(f"{tell(i)}: expected float32, got {dtype_name(memory)}")
        try:
            self._arrays = arrays_of(memories)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None
        for i, array in enumerate(self._arrays):
            if not array.flags.writeable:
                raise TypeError(f"{tell(i)} is read-only, and averages are written into it")
        self._lanes = list({id(lane): lane for lane, _ in self._slots.values()}.values())
        self._waits: list[Callable[[], object]] = []

    @property
    def arrays(self) -> Arrays:
        """The arrays: of staged tensors with the values of the last ``pull``, which is waited for."""
        while self._waits:
            self._waits.pop()()
        return self._arrays

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays)

    def places(self) -> Iterator[tuple[str, int, int, Any]]:
        """For each tensor with values its name in an error, its first byte and the one after its last, and its array.

        A staged tensor stands for itself at the address of its object: device memory is not looked into.
        """
        for i, array in enumerate(self._arrays):
            name = f"{self._what}: tensor {i}"
            if i in self._slots:
                tensor = self._slots[i][1].tensor
                yield name, id(tensor), id(tensor) + 1, tensor
            elif array.size:
                steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
                start = array.ctypes.data + sum(step for step in steps if step < 0)
                yield name, start, start + sum(map(abs, steps)) + array.itemsize, array

    def pull(self) -> None:
        """Begin to bring the tensors' values into the arrays.

        Raises:
            RuntimeError: a shared tensor has been given other memory.
        """
        for i, tensor in self._shared.items():
            array = self._arrays[i]
            if array.size and tensor.data_ptr() != array.ctypes.data:
                raise RuntimeError(
                    f"{self._what}: tensor {i} has other memory than when the worker was made, and would average what "
                    "is left behind: move a module, or set .data, before that"
                )
        for lane in self._lanes:
            lane.begin()
        for lane, slot in self._slots.values():
            lane.down(slot)
        self._waits = [lane.mark() for lane in self._lanes]

    def adopt(self, averages: Sequence[np.ndarray], alpha: float | None = None) -> None:
        """Give the tensors these values, or with ``alpha`` go that share of the way; one of ``arrays`` stays."""
        arrays = self.arrays
        for lane in self._lanes:
            lane.begin()
        for i, (array, average) in enumerate(zip(arrays, averages, strict=True)):
            if average is array:
                continue
            np.copyto(array, blend(array, average, alpha))
            if i in self._slots:
                lane, slot = self._slots[i]
                lane.up(slot)
        for lane in self._lanes:
            lane.end()

    def norm(self) -> float:
        """The L2 norm of all values as the tensors have them now."""
        total = squares([array for i, array in enumerate(self._arrays) if i not in self._slots])
        for lane in self._lanes:
            total += lane.squares([slot.tensor for its, slot in self._slots.values() if its is lane])
        return math.sqrt(total)


class Model:
    """A model as a worker takes it.

    Attributes:
        params: the parameters.
        buffers: what is averaged beside them.
    """

    def __init__(self, params: Tensors, buffers: Tensors, sig: bytes | Exception | None = None) -> None:
        self.params = params
        self.buffers = buffers
        self._sig = sig

    @property
    def sig(self) -> bytes | None:
        """The signature that the ranks of a cluster of revision 0.8 compare; None where names are not known.

        Raises:
            TypeError, EncodeError: as ``model_sig``.
        """
        if isinstance(self._sig, Exception):
            raise self._sig.with_traceback(None)
        return self._sig

    @classmethod
    def of(
        cls, params: Mapping[str, Any] | Iterable[Any] | Model, buffers: Mapping[str, Any] | Iterable[Any]
    ) -> Model:
        """The model of what a worker is given; its names are known where it is mappings.

        A mapping has all buffers of a model: those of other dtypes than float32 stay local.

        Args:
            params: the parameters, or a whole Model.
            buffers: what is averaged beside them.

        Raises:
            TypeError: as ``Tensors``; or buffers beside a Model, which has its own.
            ValueError: no parameters, or memory that two of the tensors share.
        """
        if not isinstance(params, Model):
            params = cls._of_tensors(params, buffers)
        elif tuple(buffers):
            raise TypeError("a Model has buffers of its own: buffers= is for lists of arrays")
        if not len(params.params):
            raise ValueError("a worker needs at least one parameter")
        return params

    @staticmethod
    def _of_tensors(
        params: Mapping[str, Any] | Iterable[Any], buffers: Mapping[str, Any] | Iterable[Any]
    ) -> Model:
        sig: bytes | Exception | None = None
        if isinstance(buffers, (tuple, list)) and not buffers:
            buffers = {}
        if isinstance(params, Mapping) and isinstance(buffers, Mapping):
            sig = sig_or_why(params, buffers)
        if isinstance(buffers, Mapping):
            # What tells no dtype is told from others by Tensors.
            buffers = {n: b for n, b in buffers.items() if not hasattr(b, "dtype") or dtype_name(b) == "float32"}
        model = Model(_tensors("params", params), _tensors("buffers", buffers), sig)
        check_apart(model.params, model.buffers)
        return model

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return self.params.nbytes + self.buffers.nbytes

    def __repr__(self) -> str:
        sizes = plural(len(self.params), "parameter"), plural(len(self.buffers), "buffer"), plural(self.nbytes, "byte")
        return f"{type(self).__module__}.{type(self).__name__}({', '.join(sizes)})"


def _tensors(what: str, tensors: Mapping[str, Any] | Iterable[Any]) -> Tensors:
    if isinstance(tensors, Mapping):
        return Tensors(what, tensors.values(), names=list(tensors))
    return Tensors(what, tensors)


def check_apart(*groups: Tensors) -> None:
    """Refuse tensors that share memory: it would be sent twice, and averages written over each other.

    Raises:
        ValueError: two of them do.
    """
    reached: list[tuple[str, int, int, Any]] = []
    for name, start, end, array in sorted(chain(*(group.places() for group in groups)), key=itemgetter(1)):
        reached = [place for place in reached if place[2] > start]
        for other, _, _, theirs in reached:
            if array is theirs or np.shares_memory(array, theirs):
                raise ValueError(f"{other} and {name} share memory, which would be averaged twice: give it once")
        reached.append((name, start, end, array))


def blend(array: np.ndarray, average: np.ndarray, alpha: float | None) -> np.ndarray:
    """The average, or what lies the share ``alpha`` of the way to it; in the crate's arithmetic."""
    return average if alpha is None else (average - array) * np.float32(alpha) + array


def norm(arrays: Sequence[np.ndarray], others: Sequence[np.ndarray] | None = None) -> float:
    """The L2 norm of all values, or of their differences to others."""
    return math.sqrt(squares(arrays, others))


def squares(arrays: Sequence[np.ndarray], others: Sequence[np.ndarray] | None = None) -> float:
    """The sum of the squares of all values, or of their differences to others, in float64."""
    total = 0.0
    for i, array in enumerate(arrays):
        values = array.reshape(-1)
        minus = None if others is None else others[i].reshape(-1)
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            if minus is not None:
                block = block - minus[start : start + BLOCK]
            total += float(np.dot(block, block))
    return total

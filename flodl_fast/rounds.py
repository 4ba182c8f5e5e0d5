"""Round frames as objects, their reduction, and the masses that weight them (docs/wire.md §6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import _round
from ._round import TensorLayout
from .errors import TensorError
from .protocol import MIN_FRAME_CEILING, RoundKind

__all__ = [
    "RoundFrame",
    "TensorLayout",
    "frame_ceiling",
    "gamma_mass",
    "is_realized",
    "mover_mass",
    "reduce_frames",
    "sum_frames",
]


class RoundFrame:
    """The tensors of one rank, or of one reduction, in one round.

    Args:
        tensors: float32 arrays of any shape, strides and byte order, by buffer protocol or DLPack; their memory is
            shared, not copied.
        kind: MODEL is divided by the summed weight in a reduction, CONTROL never.
        weight: the mass that the tensors were multiplied by; finite and not negative, which encoding checks.

    Raises:
        TypeError: a tensor of another dtype, which is never converted, or one without exported memory.
    """

    __slots__ = ("kind", "tensors", "weight")

    def __init__(self, tensors: Iterable[Any], kind: RoundKind = RoundKind.MODEL, weight: float = 0.0) -> None:
        self.tensors: list[np.ndarray] = list(_round.arrays_of(tensors))
        self.kind = RoundKind(kind)
        self.weight = weight

    @property
    def realized(self) -> bool:
        """Whether the tensors count: False on a MODEL frame of weight 0, whose receiver keeps its local state."""
        return self.kind is not RoundKind.MODEL or self.weight != 0

    def __repr__(self) -> str:
        return f"RoundFrame({len(self.tensors)} tensors, {self.kind!r}, weight={self.weight!r})"


def sum_frames(frames: Sequence[RoundFrame], *, finite: bool = False) -> RoundFrame:
    """Add frames up as the crate's relay and controller do: in float32, from +0.0 on, in the order of the list.

    Args:
        frames: one or more frames that agree in kind, tensor count and shapes.
        finite: refuse a NaN or an infinity among the inputs.

    Returns:
        A frame of new native arrays; its weight is the sum of the weights, in float64.

    Raises:
        TensorError: no frame, frames that do not match, or a value that ``finite`` refuses; the message names frame
            (the rank, where the list has one frame a rank), tensor and what differs.
    """
    frames = list(frames)
    return _fold(frames, range(len(frames)), finite, divide=False)


def reduce_frames(frames: Sequence[RoundFrame | None], *, finite: bool = False) -> RoundFrame:
    """Average frames as the crate's controller does: ``sum_frames``, then each value times ``float32(1 / weight)``.

    Args:
        frames: one frame a rank, None where it is absent: that counts in neither sum nor weight.
        finite: refuse a NaN or an infinity among the inputs.

    Returns:
        The reduced frame. A CONTROL frame is never divided. A MODEL frame of total weight 0 is the bare sum, with
        weight 0 and ``realized`` False: whoever receives it keeps its local state.

    Raises:
        TensorError: as ``sum_frames``; also where no frame is present.
    """
    present = [(rank, frame) for rank, frame in enumerate(frames) if frame is not None]
    return _fold([frame for _, frame in present], [rank for rank, _ in present], finite, divide=True)


def _fold(frames: list[RoundFrame], ranks: Sequence[int], finite: bool, divide: bool) -> RoundFrame:
    if not frames:
        raise TensorError("no frame is there to reduce")
    first = frames[0]
    for rank, frame in zip(ranks, frames, strict=True):
        if frame.kind is not first.kind:
            raise TensorError(f"frame {rank} is {frame.kind.name}, frame {ranks[0]} is {first.kind.name}")
        for i, tensor in enumerate(frame.tensors if finite else ()):
            at = _round.first_nonfinite(tensor)
            if at is not None:
                raise TensorError(f"frame {rank}, tensor {i}: {np.ravel(tensor)[at]} at element {at}")
    # From the first frame's weight on: weights that are all -0.0 sum to -0.0 in the crate, unlike its tensors.
    weight = first.weight
    for frame in frames[1:]:
        weight += frame.weight
    scale = None
    if divide and first.kind is RoundKind.MODEL and weight > 0:
        scale = 1.0 / weight
    return RoundFrame(_round.sum_tensors([f.tensors for f in frames], ranks, scale), first.kind, weight)


def gamma_mass(n: float, gamma: float = 1.0) -> float:
    """The mass of a rank's parameters after n batches since the last average: n ** gamma, 0 where n is not positive."""
    if n <= 0:
        return 0.0
    if gamma == 1:
        return float(n)
    try:
        return math.pow(n, gamma)
    except OverflowError:
        return math.inf


def mover_mass(n: float) -> float:
    """The mass of a rank's float buffers: 1 if it trained since the last average, else 0."""
    return 1.0 if n > 0 else 0.0


def is_realized(mass: float) -> bool:
    """Whether a mass counts: it does where it is positive."""
    return mass > 0


def frame_ceiling(model_bytes: int) -> int:
    """The crate's limit for a frame of a model with so many bytes of parameters and buffers (docs/wire.md §7)."""
    return min(max(MIN_FRAME_CEILING, 2 * model_bytes), 2**64 - 1)

"""Round frames as objects, their reduction, and the masses that weight them (docs/wire.md §6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import _round
from ._round import Elided, TensorLayout
from .errors import TensorError
from .protocol import MIN_FRAME_CEILING, RoundKind

__all__ = [
    "Elided",
    "RoundFold",
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
        tensors: float32 or bfloat16 arrays of any shape, strides and byte order, by buffer protocol or DLPack; their
            memory is shared, not copied. Also Elided, a tensor of zeros without data. Which of these a revision has,
            encoding checks.
        kind: MODEL is divided by the summed weight in a reduction, CONTROL never.
        weight: the mass that the tensors were multiplied by; finite and not negative, which encoding checks.

    Frames compare by identity: whether equal bits or equal values count is yours to say, with ``np.array_equal``.

    Raises:
        TypeError: a tensor of another dtype, which is never converted, or one without exported memory.
    """

    __slots__ = ("kind", "tensors", "weight")

    def __init__(self, tensors: Iterable[Any], kind: RoundKind = RoundKind.MODEL, weight: float = 0.0) -> None:
        self.tensors: list[np.ndarray] = list(_round.arrays_of(tensors, True))  # and Elided, which few have to see
        self.kind = kind if type(kind) is RoundKind else RoundKind(kind)
        self.weight = weight

    @property
    def realized(self) -> bool:
        """Whether the tensors count: False on a MODEL frame of weight 0, whose receiver keeps its local state."""
        return self.kind != RoundKind.MODEL or self.weight != 0

    def __repr__(self) -> str:
        return f"RoundFrame({len(self.tensors)} tensors, {self.kind!r}, weight={self.weight!r})"


def sum_frames(frames: Sequence[RoundFrame], *, finite: bool = False) -> RoundFrame:
    """Add frames up as the crate's relay and controller do: in float32, from +0.0 on, in the order of the list.

    Args:
        frames: one or more frames that agree in kind, tensor count, dtypes and shapes.
        finite: refuse a NaN or an infinity among the inputs.

    Returns:
        A frame of new native arrays, sums of bfloat16 rounded to it; its weight is the sum of the weights, in float64.
        An elided tensor adds zeros; one that all frames elide is Elided.

    Raises:
        TensorError: no frame, frames that do not match, or a value that ``finite`` refuses; the message names frame
            (the rank, where the list has one frame a rank), tensor and what differs.
    """
    frames = list(frames)
    return _fold(frames, range(len(frames)), finite, divide=False)


def reduce_frames(frames: Sequence[RoundFrame | None], *, finite: bool = False) -> RoundFrame:
    """Average frames as the crate's controller does: ``sum_frames``, then each value times ``float32(1 / weight)``.

    A sum of bfloat16 is rounded, multiplied in float32 and rounded again (docs/wire.md §9).

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


class RoundFold:
    """Adds frames up as they arrive, so that one sum is held and not every frame.

    The sums are bit for bit those of ``sum_frames`` and ``reduce_frames`` over the same frames in the same order, but
    for a NaN's payload and sign.
    """

    def __init__(self) -> None:
        self._sums: _round.TensorSums | None = None
        self._kind = RoundKind.MODEL
        self._weight = 0.0
        self._first: Any = None
        self._count = 0

    def add(self, frame: RoundFrame, name: Any = None, *, finite: bool = False) -> None:
        """Add one frame; on any error the sum is as it was.

        Args:
            frame: a frame that agrees with those before it in kind, tensor count, dtypes and shapes.
            name: what to call it in an error, such as its rank; by default the number of frames before it.
            finite: refuse a NaN or an infinity.

        Raises:
            TensorError: as ``sum_frames``.
        """
        if self._sums is None:
            name = 0 if name is None else name
            weight = _round.check_frame(RoundFrame, frame, name, None, name, finite)
            self._sums = _round.TensorSums(frame.tensors)
            self._kind, self._weight, self._first, self._count = _round.kind_of(frame, name), weight, name, 1
            return
        name = self._count if name is None else name
        weight = _round.check_frame(RoundFrame, frame, name, self._kind, self._first, finite)
        self._sums.add(frame.tensors, name, self._first)
        self._weight += weight
        self._count += 1

    def sum(self) -> RoundFrame:
        """The sum so far, as ``sum_frames`` gives it; the fold starts anew."""
        return self._take(divide=False)

    def reduce(self) -> RoundFrame:
        """The average so far, as ``reduce_frames`` gives it; the fold starts anew."""
        return self._take(divide=True)

    def _take(self, divide: bool) -> RoundFrame:
        if self._sums is None:
            raise TensorError(_NO_FRAME)
        sums, self._sums = self._sums, None
        scale = 1.0 / self._weight if divide and _round.is_divided(self._kind, self._weight) else None
        return _made(sums.result(scale), self._kind, self._weight)


_NO_FRAME = "no frame is there to reduce"


def _fold(frames: list[RoundFrame], ranks: Sequence[int], finite: bool, divide: bool) -> RoundFrame:
    if not frames:
        raise TensorError(_NO_FRAME)
    return _made(*_round.fold_frames(RoundFrame, frames, ranks, finite, divide))


def _made(tensors: list[np.ndarray], kind: RoundKind, weight: float) -> RoundFrame:
    """A frame of what is known to fit."""
    frame = RoundFrame.__new__(RoundFrame)
    frame.tensors, frame.kind, frame.weight = tensors, kind, weight
    return frame


def gamma_mass(n: float, gamma: float = 1.0) -> float:
    """The mass of a rank's parameters: ``n ** gamma``, 0 where n is not positive.

    Args:
        n: the rank's batches since the last average.
        gamma: the cluster's exponent of work.
    """
    if n <= 0:
        return 0.0
    if gamma == 1:
        return float(n)
    try:
        return math.pow(n, gamma)
    except OverflowError:
        return math.inf


def mover_mass(n: float) -> float:
    """The mass of a rank's float buffers: 1 if it trained since the last average, else 0.

    Args:
        n: the rank's batches since the last average.
    """
    return 1.0 if n > 0 else 0.0


def is_realized(mass: float) -> bool:
    """Whether a mass counts: it does where it is positive.

    Args:
        mass: a rank's, or a cohort's.
    """
    return mass > 0


def frame_ceiling(model_bytes: int) -> int:
    """The crate's limit for a round frame, in bytes (docs/wire.md §7).

    Args:
        model_bytes: the bytes of the model's parameters and buffers together.
    """
    return min(max(MIN_FRAME_CEILING, 2 * model_bytes), 2**64 - 1)

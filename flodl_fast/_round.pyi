from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from typing_extensions import Buffer, Self, disjoint_base

from ._codec import FrameCodec
from .protocol import MuxKind, RoundKind

__all__ = [
    "Elided",
    "RoundMeter",
    "TensorLayout",
    "TensorSums",
    "arrays_of",
    "check_frame",
    "decode_round",
    "encode_round",
    "first_nonfinite",
    "fold_frames",
    "fold_kernel",
    "is_divided",
    "kind_of",
]

@disjoint_base
class Elided:
    def __new__(cls, shape: Iterable[int], dtype: str = "f32") -> Elided: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's dimensions."""
    @property
    def dtype(self) -> str:
        """ "f32" or "bf16"."""
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@disjoint_base
class RoundMeter:
    def __new__(cls, codec: FrameCodec) -> Self: ...
    def measure(self, buffer: Buffer, offset: int = 0) -> int | None: ...

@disjoint_base
class TensorLayout:
    @staticmethod
    def of(arrays: Iterable[Any], *, wire: str | None = None) -> TensorLayout: ...
    @staticmethod
    def from_frame(codec: FrameCodec, buffer: Buffer, *, trailing: str = "ignore") -> TensorLayout: ...
    @property
    def frame_size(self) -> int: ...
    @property
    def dtype(self) -> np.ndarray: ...
    @property
    def ndim(self) -> np.ndarray: ...
    @property
    def shape(self) -> np.ndarray: ...
    @property
    def nbytes(self) -> np.ndarray: ...
    @property
    def offset(self) -> np.ndarray: ...
    @overload
    def encode(
        self,
        codec: FrameCodec,
        arrays: Iterable[Any],
        kind: RoundKind | int,
        weight: float,
        out: None = None,
        *,
        scale: float | None = None,
    ) -> bytes: ...
    @overload
    def encode(
        self,
        codec: FrameCodec,
        arrays: Iterable[Any],
        kind: RoundKind | int,
        weight: float,
        out: Buffer,
        *,
        scale: float | None = None,
    ) -> int: ...
    def encode_record(
        self,
        codec: FrameCodec,
        arrays: Iterable[Any],
        kind: RoundKind | int,
        weight: float,
        record: MuxKind | int,
        out: Buffer,
        *,
        scale: float | None = None,
    ) -> int: ...
    def parts(
        self, codec: FrameCodec, arrays: Iterable[Any], kind: RoundKind | int, weight: float
    ) -> list[memoryview]: ...
    def decode_into(
        self,
        codec: FrameCodec,
        buffer: Buffer,
        arrays: Iterable[Any],
        *,
        record: MuxKind | int | None = None,
        trailing: str = "ignore",
    ) -> tuple[RoundKind, float]: ...
    def _repr_html_(self) -> str: ...
    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@disjoint_base
class TensorSums:
    def __init__(self, tensors: Iterable[Any]) -> None: ...
    def add(self, tensors: Iterable[Any], name: Any, first_name: Any) -> None: ...
    def result(self, scale: float | None) -> list[Any]: ...

@overload
def arrays_of(tensors: Iterable[Any]) -> tuple[np.ndarray, ...]: ...
@overload
def arrays_of(tensors: Iterable[Any], elided: bool) -> tuple[Any, ...]: ...
def encode_round(
    codec: FrameCodec,
    tensors: Iterable[Any],
    kind: RoundKind | int,
    weight: float,
    wire: str | None = None,
    elide: bool = False,
    out: Buffer | None = None,
    offset: int = 0,
) -> bytes | int: ...
def check_frame(cls: type, frame: Any, name: Any, kind: RoundKind | None, first_name: Any, finite: bool) -> float: ...
def fold_frames(
    cls: type, frames: list[Any], ranks: Sequence[Any], finite: bool, divide: bool
) -> tuple[list[Any], RoundKind, float]: ...
def is_divided(kind: RoundKind, weight: float) -> bool: ...
def kind_of(frame: Any, name: Any) -> RoundKind: ...
def decode_round(
    codec: FrameCodec,
    buffer: Buffer,
    copy: bool,
    out: Iterable[Any] | None,
    keep: bool,
    finite: bool,
    record: MuxKind | int | None,
    trailing: str,
) -> tuple[list[Any], RoundKind, float]: ...
def first_nonfinite(tensor: np.ndarray | Elided) -> tuple[int, float] | None: ...
def fold_kernel() -> tuple[str, list[str]]: ...

from collections.abc import Iterable
from typing import Any, Literal, overload

import numpy as np
from typing_extensions import Buffer, Self, disjoint_base

from .messages import ControlMsg, JoinMsg, Message, MetricsMsg, RelayMsg, RendezvousMsg, Reserved, TimingMsg
from .protocol import MsgKind, MuxKind, Revision

__all__ = ["FrameCodec", "check_values", "family_name", "is_strict", "plain_number", "sha256_kernel", "whole_number"]

@disjoint_base
class FrameCodec:
    def __new__(
        cls,
        salt: bytes | str,
        revision: Revision | str = "0.6",
        *,
        max_payload: int = ...,
        max_tensors: int = ...,
        frame_ceiling: int = ...,
        lenient: bool = False,
    ) -> Self: ...
    @property
    def revision(self) -> Revision:
        """The revision that is spoken."""
    @property
    def lenient(self) -> bool:
        """Whether payloads of an older revision are taken, too."""
    @property
    def max_payload(self) -> int:
        """The largest control payload taken or sent, in bytes."""
    @property
    def max_tensors(self) -> int:
        """The most tensors in a round frame."""
    @property
    def frame_ceiling(self) -> int:
        """The most tensor bytes in a round frame, and the most bytes in a mux payload or length prefix."""
    def mac(self, data: Buffer) -> bytes: ...
    def encode(self, message: Message) -> bytes: ...
    def encode_into(self, message: Message, buffer: Buffer, offset: int = 0) -> int: ...
    def encode_payload(self, message: Message | RelayMsg) -> bytes: ...
    def decode(self, frame: Buffer, *, trailing: str = "ignore") -> Message: ...
    @overload
    def decode_payload(
        self, kind: Literal[MsgKind.CONTROL, "Control"], payload: Buffer, *, trailing: str = "ignore"
    ) -> ControlMsg: ...
    @overload
    def decode_payload(
        self, kind: Literal[MsgKind.TIMING, "Timing"], payload: Buffer, *, trailing: str = "ignore"
    ) -> TimingMsg: ...
    @overload
    def decode_payload(
        self, kind: Literal[MsgKind.METRICS, "Metrics"], payload: Buffer, *, trailing: str = "ignore"
    ) -> MetricsMsg: ...
    @overload
    def decode_payload(
        self, kind: Literal[MsgKind.RENDEZVOUS, "Rendezvous"], payload: Buffer, *, trailing: str = "ignore"
    ) -> RendezvousMsg: ...
    @overload
    def decode_payload(
        self, kind: Literal[MsgKind.JOIN, "Join"], payload: Buffer, *, trailing: str = "ignore"
    ) -> JoinMsg: ...
    @overload
    def decode_payload(self, kind: Literal["Relay"], payload: Buffer, *, trailing: str = "ignore") -> RelayMsg: ...
    @overload
    def decode_payload(
        self,
        kind: Literal[MsgKind.PARAM_SNAPSHOT_META, MsgKind.HEARTBEAT],
        payload: Buffer,
        *,
        trailing: str = "ignore",
    ) -> Reserved: ...
    @overload
    def decode_payload(self, kind: MsgKind | int | str, payload: Buffer, *, trailing: str = "ignore") -> Any: ...
    def measure_frame(self, buffer: Buffer, offset: int = 0) -> int | None: ...
    def take_frame(self, buffer: Buffer, offset: int, prefixed: bool, strict: bool) -> tuple[Message, int] | None: ...
    def encode_many(self, messages: Iterable[Message], *, prefixed: bool = False) -> bytes: ...
    def decode_many(
        self, buffer: Buffer, *, prefixed: bool = False, trailing: str = "ignore"
    ) -> tuple[list[Message], int]: ...
    def timing_columns(
        self, buffer: Buffer, *, prefixed: bool = False, trailing: str = "ignore"
    ) -> dict[str, np.ndarray]: ...
    def seal_record(self, kind: int, rank: int, payload: Buffer) -> bytes: ...
    def measure_record(self, buffer: Buffer, offset: int = 0) -> int | None: ...
    def open_record(self, buffer: Buffer, *, trailing: str = "ignore") -> tuple[MuxKind, int, bytes]: ...

def check_values(message: Message | RelayMsg) -> None: ...
def family_name(kind: MsgKind | int | str) -> str: ...
def is_strict(trailing: str) -> bool: ...
def plain_number(value: Any, integer: bool) -> int | float | None: ...
def whole_number(value: Any, what: str, least: int, most: int) -> int: ...
def sha256_kernel() -> tuple[str, list[str]]: ...

"""The crate's conversion between in-process messages and wire messages (docs/wire.md §5).

Most messages are the same object on both sides. Three are not: their in-process forms are the classes of this module.
Every conversion checks that the values are ones that the wire can carry, u64 above all, and never changes the message
that it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar, Union, cast, get_args

from . import messages as wire
from ._codec import check_values, plain_number
from .errors import ReservedTargetError
from .protocol import RESERVED_RANK

__all__ = [
    "DeclareDead",
    "InProcessControlMsg",
    "InProcessTimingMsg",
    "NewNcclSession",
    "ShutdownWithSave",
    "control_wire_to_msg",
    "epoch_metrics_from_wire",
    "epoch_metrics_to_wire",
    "metrics_msg_to_wire",
    "timing_msg_to_wire",
]


@dataclass(slots=True)
class DeclareDead:
    """A peer died; which one is handled before this signal."""


@dataclass(slots=True)
class NewNcclSession:
    """A new NCCL session begins; its id, rank and size are handled before this signal."""


@dataclass(slots=True)
class ShutdownWithSave:
    """Save for this reason, then end."""

    reason: wire.SaveReason


InProcessTimingMsg = Union[
    wire.Batch,
    wire.SyncAck,
    wire.Exiting,
    wire.LrUpdate,
    wire.Intent,
    wire.Heartbeat,
    wire.SnapshotReady,
    wire.EvalResult,
    wire.CheckpointResult,
    wire.NewNcclIdGenerated,
    wire.EpochFnElapsed,
]

InProcessControlMsg = Union[
    wire.RequestParams,
    wire.SyncNow,
    wire.StartEpoch,
    wire.ExtendPartition,
    DeclareDead,
    wire.RequestNewNcclId,
    NewNcclSession,
    wire.Throttle,
    wire.SetGlobalStep,
    wire.Checkpoint,
    wire.ExecuteEvalCallback,
    wire.SetEpochCallbackRole,
    wire.Shutdown,
    ShutdownWithSave,
    wire.EpochAggregated,
    wire.EvalBroadcast,
    wire.SaveConsensusModel,
    wire.StageAdvisory,
]

_Timing = TypeVar("_Timing", bound=InProcessTimingMsg)
_TIMING = get_args(InProcessTimingMsg)
_CONTROL = get_args(wire.ControlMsg)
_TARGETED = (wire.Checkpoint, wire.ExecuteEvalCallback, wire.SaveConsensusModel)


def timing_msg_to_wire(message: _Timing) -> _Timing:
    """The wire form of an in-process Timing message: the same object, checked.

    Args:
        message: the message.

    Raises:
        TypeError: not one of the eleven in-process Timing messages (the dashboard's are made as wire messages), or a
            field of the wrong type.
        EncodeError: a field out of range, such as a rank outside 0 to 2**64 - 1.
    """
    if not isinstance(message, _TIMING):
        raise TypeError(f"{type(message).__name__} is not an in-process Timing message")
    check_values(message)
    return message


def control_wire_to_msg(message: wire.ControlMsg) -> InProcessControlMsg | None:
    """The in-process form of a Control message.

    Update and CoordHeartbeat have none and give None: whoever reads the wire has handled them before. DeclareDead,
    NewNcclSession and RequestNewNcclId become signals without a payload. A save reason that is not known counts as
    GRACEFUL_SHUTDOWN. Every other message is the same object, checked.

    Args:
        message: a Control message of the wire.

    Raises:
        ReservedTargetError: Checkpoint, ExecuteEvalCallback or SaveConsensusModel with target rank 2**64 - 1.
        TypeError: not a Control message, or a field of the wrong type.
        EncodeError: a field out of range.
    """
    if not isinstance(message, _CONTROL):
        raise TypeError(f"{type(message).__name__} is not a Control message of the wire")
    check_values(message)
    if isinstance(message, (wire.Update, wire.CoordHeartbeat)):
        return None
    if isinstance(message, wire.DeclareDead):
        return DeclareDead()
    if isinstance(message, wire.NewNcclSession):
        return NewNcclSession()
    if isinstance(message, wire.ShutdownWithSave):
        reason = cast(int, plain_number(message.reason, True))
        known = reason in wire.SaveReason._value2member_map_
        return ShutdownWithSave(wire.SaveReason(reason) if known else wire.SaveReason.GRACEFUL_SHUTDOWN)
    if isinstance(message, _TARGETED) and plain_number(message.target_rank, True) == RESERVED_RANK:
        raise ReservedTargetError(
            f"{type(message).__name__}.target_rank is 2**64 - 1, which flodl reserves in process for 'no rank': "
            "no rank can be meant by it"
        )
    return cast(InProcessControlMsg, message)


def metrics_msg_to_wire(message: wire.MetricsMsg) -> wire.MetricsMsg:
    """The wire form of a rank's metrics: a copy without resources, which are filled in only where sampling is on.

    Args:
        message: a plan's report.

    Raises:
        TypeError, EncodeError: as ``timing_msg_to_wire``.
    """
    if not isinstance(message, wire.MetricsMsg):
        raise TypeError(f"expected MetricsMsg, got {type(message).__name__}")
    converted = replace(message, resources=None)
    check_values(converted)
    return converted


def epoch_metrics_to_wire(metrics: wire.EpochMetrics) -> wire.EpochMetrics:
    """The wire form of an epoch's metrics: the same object, checked.

    Args:
        metrics: the cohort's metrics of an epoch.

    Raises:
        TypeError, EncodeError: as ``timing_msg_to_wire``.
    """
    if not isinstance(metrics, wire.EpochMetrics):
        raise TypeError(f"expected EpochMetrics, got {type(metrics).__name__}")
    check_values(wire.EpochAggregated(metrics))
    return metrics


def epoch_metrics_from_wire(metrics: wire.EpochMetrics) -> wire.EpochMetrics:
    """The in-process form of an epoch's metrics: the same object, checked.

    Args:
        metrics: the metrics as they came.

    Raises:
        TypeError, EncodeError: as ``timing_msg_to_wire``.
    """
    return epoch_metrics_to_wire(metrics)

"""Every message of the wire, one plain class each (docs/wire.md §4).

Field order is wire order and the annotations are the wire types of ``layout.py``: nothing else says how a message is
laid out. Integer fields take Python ints and NumPy integers in the range of their type, float fields take floats,
ints and NumPy floats; a bool is neither. Vectors are lists, byte vectors bytes, pairs tuples, and maps dicts in wire
order. Times are milliseconds, sizes bytes, unless a name says otherwise.

A message checks its values when it is encoded: out of range is an EncodeError, a wrong type a TypeError, each naming
the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from enum import IntEnum
from typing import Annotated, Any, Union
from typing import Optional as Opt

from .display import one_line
from .layout import Bytes32, Since, f32, f64, i32, u8, u16, u32, u64
from .protocol import MsgKind

__all__ = [
    "Batch",
    "Checkpoint",
    "CheckpointResult",
    "ControlMsg",
    "CoordHeartbeat",
    "DashboardRegister",
    "DashboardSetHardware",
    "DashboardSetMetadata",
    "DashboardSetSvg",
    "DeclareDead",
    "EpochAggregated",
    "EpochFnElapsed",
    "EpochMetrics",
    "EpochPlan",
    "EvalBroadcast",
    "EvalResult",
    "ExecuteEvalCallback",
    "Exiting",
    "ExtendPartition",
    "GpuSnapshot",
    "Heartbeat",
    "Intent",
    "IntentKind",
    "JoinAbort",
    "JoinAccept",
    "JoinHello",
    "JoinMsg",
    "JoinRankExited",
    "JoinReject",
    "JoinWorldFormed",
    "LrUpdate",
    "Message",
    "MetricsMsg",
    "NewNcclIdGenerated",
    "NewNcclSession",
    "RelayDeclareDead",
    "RelayHello",
    "RelayHelloAck",
    "RelayMsg",
    "RelayRankExit",
    "RendezvousHello",
    "RendezvousMsg",
    "RendezvousRole",
    "RendezvousRoleMsg",
    "RendezvousUid",
    "RequestNewNcclId",
    "RequestParams",
    "Reserved",
    "ResourceSample",
    "SaveConsensusModel",
    "SaveReason",
    "SetEpochCallbackRole",
    "SetGlobalStep",
    "Shutdown",
    "ShutdownWithSave",
    "SnapshotReady",
    "StageAdvisory",
    "StartEpoch",
    "SyncAck",
    "SyncNow",
    "Throttle",
    "TimingMsg",
    "TimingResourceSample",
    "Update",
]

# --------------------------------------------------------------------------------------------- enums and plain structs


class SaveReason(IntEnum):
    """Why a run ends with a save; a plain u8 on the wire (``ShutdownWithSave.reason``)."""

    GRACEFUL_SHUTDOWN = 0
    MAX_FAILURE_EXCEEDED = 1
    SINGLE_SURVIVOR = 2
    ALL_RANKS_LOST = 3
    REDUCE_STALL = 4
    CHECKPOINT = 5


class IntentKind(IntEnum):
    """What a rank asks the coordinator for."""

    EVAL_NOW = 0
    CHECKPOINT_NOW = 1


class RendezvousRole(IntEnum):
    """Who makes the NCCL unique id, and who waits for it."""

    GENERATE = 0
    WAIT = 1


@dataclass(slots=True)
class EpochPlan:
    """A slice of an epoch for one rank; offset and size count samples of the epoch's shuffled pick list."""

    epoch: u64
    partition_offset: u64
    partition_size: u64


@dataclass(slots=True)
class GpuSnapshot:
    """One GPU at one moment."""

    device_index: u8
    name: str
    util_percent: Opt[f32] = None
    vram_allocated_bytes: Opt[u64] = None
    vram_total_bytes: Opt[u64] = None


@dataclass(slots=True)
class ResourceSample:
    """What a rank's host had in use at one moment."""

    cpu_percent: Opt[f32] = None
    ram_used_bytes: Opt[u64] = None
    ram_total_bytes: Opt[u64] = None
    gpu_util_percent: Opt[f32] = None
    vram_total_bytes: Opt[u64] = None
    vram_allocated_bytes: Opt[u64] = None
    aggregate_rank: Opt[u8] = None
    gpus: list[GpuSnapshot] = field(default_factory=list)


@dataclass(slots=True)
class EpochMetrics:
    """The cohort's metrics of one epoch; the per_rank lists are indexed by rank.

    Since 0.7 ``per_rank_loss`` is there, None for a rank without a loss, and ``per_rank_samples``.
    """

    epoch: u64
    scalars: dict[str, f64] = field(default_factory=dict)
    per_rank: list[dict[str, f64]] = field(default_factory=list)
    avg_loss: f64 = 0.0
    epoch_ms: f64 = 0.0
    per_rank_throughput: list[f64] = field(default_factory=list)
    per_rank_batch_share: list[f64] = field(default_factory=list)
    per_rank_share_complete_ms: list[f64] = field(default_factory=list)
    per_rank_compute_only_ms: list[f64] = field(default_factory=list)
    per_rank_data_starve_ms: list[f64] = field(default_factory=list)
    device_indices: bytes = b""
    per_rank_loss: Annotated[list[Opt[f64]], Since("0.7")] = field(default_factory=list)
    per_rank_samples: Annotated[list[u64], Since("0.7")] = field(default_factory=list)


@dataclass(slots=True)
class MetricsMsg:
    """What a rank reports at the end of a plan; ``scalars`` maps a name to (sum, count) since the last report."""

    rank: u64
    epoch: u64
    avg_loss: f64 = 0.0
    batches_processed: u64 = 0
    epoch_ms: f64 = 0.0
    samples_processed: u64 = 0
    share_complete_ms: f64 = 0.0
    compute_only_ms: f64 = 0.0
    data_starve_ms: f64 = 0.0
    scalars: dict[str, tuple[f64, u64]] = field(default_factory=dict)
    resources: Opt[ResourceSample] = None


# ------------------------------------------------------------------------------------- Control: coordinator to rank


@dataclass(slots=True)
class RequestParams:
    """Snapshot the parameters now and run the reduce (CPU backend)."""


@dataclass(slots=True)
class Update:
    """The averaging cycle is closed; ``next_plan`` counts as a StartEpoch."""

    version: u64
    next_plan: Opt[EpochPlan] = None


@dataclass(slots=True)
class SyncNow:
    """Run the all-reduce now (NCCL backend)."""


@dataclass(slots=True)
class StartEpoch:
    """Train this slice."""

    plan: EpochPlan


@dataclass(slots=True)
class ExtendPartition:
    """Append this slice to the current epoch."""

    partition_offset: u64
    partition_size: u64


@dataclass(slots=True)
class DeclareDead:
    """A peer died (NCCL backend)."""

    rank: u64


@dataclass(slots=True)
class RequestNewNcclId:
    """Make a new NCCL unique id."""


@dataclass(slots=True)
class NewNcclSession:
    """Start over with this NCCL unique id, rank and world size."""

    uid_bytes: bytes
    new_rank: u64
    new_world_size: u64


@dataclass(slots=True)
class Throttle:
    """Stop stepping until the cycle closes."""


@dataclass(slots=True)
class SetGlobalStep:
    """Batches trained by the whole cohort: the base of the learning-rate schedule."""

    global_step: u64


@dataclass(slots=True)
class Checkpoint:
    """The target rank, and only that, runs its checkpoint callback."""

    version: u64
    target_rank: u64


@dataclass(slots=True)
class ExecuteEvalCallback:
    """The target rank, and only that, evaluates."""

    schedule_id: u64
    epoch: u64
    target_rank: u64


@dataclass(slots=True)
class SetEpochCallbackRole:
    """The rank that fires the per-epoch callback."""

    rank: u64


@dataclass(slots=True)
class Shutdown:
    """The clean end."""


@dataclass(slots=True)
class ShutdownWithSave:
    """Save, then end. ``reason`` is the raw byte; ``control_wire_to_msg`` gives the SaveReason."""

    reason: u8


@dataclass(slots=True)
class EpochAggregated:
    """The cohort's metrics of an epoch, sent to every rank."""

    metrics: EpochMetrics


@dataclass(slots=True)
class EvalBroadcast:
    """The result of an evaluation, for everyone."""

    epoch: u64
    metric: f64


@dataclass(slots=True)
class SaveConsensusModel:
    """The target rank saves the consensus model (NCCL backend)."""

    target_rank: u64


@dataclass(slots=True)
class CoordHeartbeat:
    """The coordinator's beacon, about one a second."""


@dataclass(slots=True)
class StageAdvisory:
    """A prefetch hint that may be ignored; ``segments`` are (epoch, [(offset, size), ...])."""

    counts: list[u64] = field(default_factory=list)
    segments: list[tuple[u64, list[tuple[u64, u64]]]] = field(default_factory=list)


ControlMsg = Union[
    RequestParams,
    Update,
    SyncNow,
    StartEpoch,
    ExtendPartition,
    DeclareDead,
    RequestNewNcclId,
    NewNcclSession,
    Throttle,
    SetGlobalStep,
    Checkpoint,
    ExecuteEvalCallback,
    SetEpochCallbackRole,
    Shutdown,
    ShutdownWithSave,
    EpochAggregated,
    EvalBroadcast,
    SaveConsensusModel,
    CoordHeartbeat,
    StageAdvisory,
]


# -------------------------------------------------------------------------------------- Timing: rank to coordinator


@dataclass(slots=True)
class Batch:
    """One batch was trained; ``step_count`` is cumulative."""

    rank: u64
    batch_ms: f64
    data_ms: f64
    step_count: u64
    param_norm: Opt[f64] = None
    batch_loss: f64 = 0.0
    sync_divergence: Opt[f64] = None


@dataclass(slots=True)
class SyncAck:
    """The rank has adopted the average; mind the order of the norms. A divergence of None leaves the cycle open."""

    rank: u64
    step_count: u64
    divergence: Opt[f64] = None
    post_norm: Opt[f64] = None
    pre_norm: Opt[f64] = None


@dataclass(slots=True)
class Exiting:
    """The rank ends cleanly."""

    rank: u64


@dataclass(slots=True)
class LrUpdate:
    """The learning rate that the rank now uses."""

    rank: u64
    lr: f64


@dataclass(slots=True)
class Intent:
    """The rank asks for an evaluation or a checkpoint."""

    rank: u64
    kind: IntentKind


@dataclass(slots=True)
class Heartbeat:
    """The rank lives; ``step_count`` counts beacons, not steps."""

    rank: u64
    step_count: u64


@dataclass(slots=True)
class SnapshotReady:
    """The rank's parameters are ready for the reduce."""

    rank: u64


@dataclass(slots=True)
class EvalResult:
    """What an evaluation gave; ``metric`` is NaN where ``error`` is set."""

    rank: u64
    schedule_id: u64
    epoch: u64
    metric: f64
    elapsed_ms: f64
    error: Opt[str] = None


@dataclass(slots=True)
class CheckpointResult:
    """How a checkpoint went; with ``error`` set another rank is tried."""

    rank: u64
    version: u64
    elapsed_ms: f64
    error: Opt[str] = None


@dataclass(slots=True)
class NewNcclIdGenerated:
    """A new NCCL unique id (NCCL backend)."""

    rank: u64
    uid_bytes: bytes


@dataclass(slots=True)
class EpochFnElapsed:
    """The per-epoch callback ran."""

    rank: u64
    epoch: u64
    elapsed_ms: f64


@dataclass(slots=True)
class DashboardRegister:
    """The rank serves a dashboard at this port."""

    rank: u64
    port: u16


@dataclass(slots=True)
class DashboardSetSvg:
    """The model's drawing for the dashboard."""

    rank: u64
    svg: str
    label: Opt[str] = None
    hash: Opt[str] = None


@dataclass(slots=True)
class DashboardSetMetadata:
    """Metadata for the dashboard, as JSON text."""

    rank: u64
    json: str


@dataclass(slots=True)
class DashboardSetHardware:
    """The rank's hardware in words."""

    rank: u64
    summary: str


@dataclass(slots=True)
class TimingResourceSample:
    """What the rank's host had in use, at most every 500 ms; since 0.7."""

    rank: u64
    sample: ResourceSample


TimingMsg = Union[
    Batch,
    SyncAck,
    Exiting,
    LrUpdate,
    Intent,
    Heartbeat,
    SnapshotReady,
    EvalResult,
    CheckpointResult,
    NewNcclIdGenerated,
    EpochFnElapsed,
    DashboardRegister,
    DashboardSetSvg,
    DashboardSetMetadata,
    DashboardSetHardware,
    Annotated[TimingResourceSample, Since("0.7")],
]


# ------------------------------------------------------------------------- Rendezvous: the exchange of the NCCL id


@dataclass(slots=True)
class RendezvousHello:
    """A rank presents itself; every rank must present the same ``dataset_sig`` (32 bytes)."""

    dataset_sig: Bytes32
    global_rank: u32
    host_name: str


@dataclass(slots=True)
class RendezvousRoleMsg:
    """The controller tells a rank its role."""

    role: RendezvousRole


@dataclass(slots=True)
class RendezvousUid:
    """The NCCL unique id; the crate demands 128 bytes."""

    uid_bytes: bytes


RendezvousMsg = Union[RendezvousHello, RendezvousRoleMsg, RendezvousUid]


# ------------------------------------------------------------------------------- Join: an agent enters the cluster


@dataclass(slots=True)
class JoinHello:
    """An agent offers its host's devices."""

    host: str
    local_devices: bytes
    gpus: list[str]
    libtorch: str
    dataset_sig: Bytes32
    run_id: Annotated[Opt[str], Since("0.8")] = None
    nccl_version: Annotated[Opt[tuple[u32, u32, u32]], Since("0.8")] = None
    model_sig: Annotated[Opt[Bytes32], Since("0.8")] = None


@dataclass(slots=True)
class JoinAccept:
    """The controller admits the host with these ranks; its repr leaves the salt out."""

    ranks: list[u32]
    salt_hex: Opt[str] = field(repr=False)
    formation_wait_secs: u64


@dataclass(slots=True)
class JoinReject:
    """The controller refuses the host."""

    reason: str


@dataclass(slots=True)
class JoinWorldFormed:
    """The world is complete; envelope and relay spec are hex of JSON (docs/wire.md §8).

    Both hold the salt, so that the repr leaves them out.
    """

    envelope_hex: str = field(repr=False)
    relay_spec_hex: Opt[str] = field(default=None, repr=False)


@dataclass(slots=True)
class JoinRankExited:
    """A rank's process ended; the code is -1 where a signal ended it."""

    rank: u32
    code: i32


@dataclass(slots=True)
class JoinAbort:
    """The world will not form, or is given up."""

    reason: str


JoinMsg = Union[JoinHello, JoinAccept, JoinReject, JoinWorldFormed, JoinRankExited, JoinAbort]


# -------------------------------------------------------- Relay: between relay and controller, inside mux records


@dataclass(slots=True)
class RelayHello:
    """A relay presents its host's ranks, ascending; at 0.8, on the control leg, with each rank's model signature."""

    host: str
    ranks: list[u32]
    model_sigs: Annotated[list[Bytes32], Since("0.8")] = field(default_factory=list)


@dataclass(slots=True)
class RelayHelloAck:
    """The controller has taken the relay's hello."""


@dataclass(slots=True)
class RelayRankExit:
    """A rank of this relay is gone (relay to controller)."""

    rank: u32


@dataclass(slots=True)
class RelayDeclareDead:
    """A rank is declared dead (controller to relay, data leg)."""

    rank: u32


RelayMsg = Union[RelayHello, RelayHelloAck, RelayRankExit, RelayDeclareDead]


# ----------------------------------------------------------------------------------------------- kinds of payload


@dataclass(slots=True)
class Reserved:
    """A frame of a reserved kind (4 or 5), its payload as it came."""

    kind: MsgKind
    payload: bytes


#: What the payload of each kind of frame is; "Relay" is the payload of a control mux record.
PAYLOADS: dict[str, tuple[MsgKind | None, Any]] = {
    "Control": (MsgKind.CONTROL, ControlMsg),
    "Timing": (MsgKind.TIMING, TimingMsg),
    "Metrics": (MsgKind.METRICS, MetricsMsg),
    "Rendezvous": (MsgKind.RENDEZVOUS, RendezvousMsg),
    "Join": (MsgKind.JOIN, JoinMsg),
    "Relay": (None, RelayMsg),
}

Message = Union[ControlMsg, TimingMsg, MetricsMsg, RendezvousMsg, JoinMsg, Reserved]

for _class in [value for value in globals().values() if isinstance(value, type) and is_dataclass(value)]:
    _class.__repr__ = one_line  # type: ignore[method-assign]

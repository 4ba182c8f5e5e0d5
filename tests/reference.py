"""The wire of all revisions in plain Python: the judge of the compiled package.

Written from docs/wire.md alone and sharing nothing with the package, not even its tables. Slow and plain on
purpose. Messages are in the crate's JSON form (tests/golden/README.md), except that a float may be a NaN or
an infinity and only an absent option is None; `to_json` nulls such floats as the crate's JSON writer does.
Round frames are `{"kind", "weight", "tensors": [{"dtype", "shape", "bytes": hex}]}`; a tensor with values and without
bytes is elided.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import struct
from array import array
from typing import Any, NamedTuple

Json = Any


class WireError(ValueError):
    """What was refused and why.

    `what` is one of truncated, magic, version, kind, limit, mac, payload (an authentic payload or a round's
    weight that breaks its rules), tensor, world and, when encoding or converting, value.
    """

    def __init__(self, what: str, detail: str):
        super().__init__(f"{what}: {detail}")
        self.what = what


def check(condition: bool, what: str, detail: str) -> None:
    if not condition:
        raise WireError(what, detail)


# Messages: docs/wire.md §4. A type is a scalar's name, a container below, or a dict of fields in wire order.

class Opt(NamedTuple):
    of: Any


class Vec(NamedTuple):
    of: Any


class Map(NamedTuple):
    """String keys."""

    of: Any


class Array(NamedTuple):
    of: Any
    size: int


class Since(NamedTuple):
    """A field or variant that older revisions do not have."""

    revision: str
    of: Any


class Tuple(NamedTuple):
    of: tuple[Any, ...]


class Enum(NamedTuple):
    """Variants in index order; one with fields and one that wraps a struct look alike, here and in JSON."""

    variants: dict[str, Any]


UNIT: dict[str, Any] = {}
BYTES = Vec("u8")
DIGEST = Array("u8", 32)
F64S = Vec("f64")

EPOCH_PLAN = {"epoch": "u64", "partition_offset": "u64", "partition_size": "u64"}

EPOCH_METRICS = {
    "epoch": "u64", "scalars": Map("f64"), "per_rank": Vec(Map("f64")), "avg_loss": "f64", "epoch_ms": "f64",
    "per_rank_throughput": F64S, "per_rank_batch_share": F64S, "per_rank_share_complete_ms": F64S,
    "per_rank_compute_only_ms": F64S, "per_rank_data_starve_ms": F64S, "device_indices": BYTES,
    "per_rank_loss": Since("0.7", Vec(Opt("f64"))), "per_rank_samples": Since("0.7", Vec("u64")),
}

GPU_SNAPSHOT = {
    "device_index": "u8", "name": "text", "util_percent": Opt("f32"), "vram_allocated_bytes": Opt("u64"),
    "vram_total_bytes": Opt("u64"),
}

RESOURCE_SAMPLE = {
    "cpu_percent": Opt("f32"), "ram_used_bytes": Opt("u64"), "ram_total_bytes": Opt("u64"),
    "gpu_util_percent": Opt("f32"), "vram_total_bytes": Opt("u64"), "vram_allocated_bytes": Opt("u64"),
    "aggregate_rank": Opt("u8"), "gpus": Vec(GPU_SNAPSHOT),
}

MESSAGES: dict[str, Any] = {
    "Control": Enum({
        "RequestParams": UNIT,
        "Update": {"version": "u64", "next_plan": Opt(EPOCH_PLAN)},
        "SyncNow": UNIT,
        "StartEpoch": EPOCH_PLAN,
        "ExtendPartition": {"partition_offset": "u64", "partition_size": "u64"},
        "DeclareDead": {"rank": "u64"},
        "RequestNewNcclId": UNIT,
        "NewNcclSession": {"uid_bytes": BYTES, "new_rank": "u64", "new_world_size": "u64"},
        "Throttle": UNIT,
        "SetGlobalStep": {"global_step": "u64"},
        "Checkpoint": {"version": "u64", "target_rank": "u64"},
        "ExecuteEvalCallback": {"schedule_id": "u64", "epoch": "u64", "target_rank": "u64"},
        "SetEpochCallbackRole": {"rank": "u64"},
        "Shutdown": UNIT,
        "ShutdownWithSave": {"reason": "u8"},
        "EpochAggregated": EPOCH_METRICS,
        "EvalBroadcast": {"epoch": "u64", "metric": "f64"},
        "SaveConsensusModel": {"target_rank": "u64"},
        "CoordHeartbeat": UNIT,
        "StageAdvisory": {"counts": Vec("u64"), "segments": Vec(Tuple(("u64", Vec(Tuple(("u64", "u64"))))))},
    }),
    "Timing": Enum({
        "Batch": {
            "rank": "u64", "batch_ms": "f64", "data_ms": "f64", "step_count": "u64", "param_norm": Opt("f64"),
            "batch_loss": "f64", "sync_divergence": Opt("f64"),
        },
        "SyncAck": {
            "rank": "u64", "step_count": "u64", "divergence": Opt("f64"), "post_norm": Opt("f64"),
            "pre_norm": Opt("f64"),
        },
        "Exiting": {"rank": "u64"},
        "LrUpdate": {"rank": "u64", "lr": "f64"},
        "Intent": {"rank": "u64", "kind": Enum({"EvalNow": UNIT, "CheckpointNow": UNIT})},
        "Heartbeat": {"rank": "u64", "step_count": "u64"},
        "SnapshotReady": {"rank": "u64"},
        "EvalResult": {
            "rank": "u64", "schedule_id": "u64", "epoch": "u64", "metric": "f64", "elapsed_ms": "f64",
            "error": Opt("text"),
        },
        "CheckpointResult": {"rank": "u64", "version": "u64", "elapsed_ms": "f64", "error": Opt("text")},
        "NewNcclIdGenerated": {"rank": "u64", "uid_bytes": BYTES},
        "EpochFnElapsed": {"rank": "u64", "epoch": "u64", "elapsed_ms": "f64"},
        "DashboardRegister": {"rank": "u64", "port": "u16"},
        "DashboardSetSvg": {"rank": "u64", "svg": "text", "label": Opt("text"), "hash": Opt("text")},
        "DashboardSetMetadata": {"rank": "u64", "json": "text"},
        "DashboardSetHardware": {"rank": "u64", "summary": "text"},
        "ResourceSample": Since("0.7", {"rank": "u64", "sample": RESOURCE_SAMPLE}),
    }),
    "Metrics": {
        "rank": "u64", "epoch": "u64", "avg_loss": "f64", "batches_processed": "u64", "epoch_ms": "f64",
        "samples_processed": "u64", "share_complete_ms": "f64", "compute_only_ms": "f64",
        "data_starve_ms": "f64", "scalars": Map(Tuple(("f64", "u64"))), "resources": Opt(RESOURCE_SAMPLE),
    },
    "Rendezvous": Enum({
        "Hello": {"dataset_sig": DIGEST, "global_rank": "u32", "host_name": "text"},
        "Role": Enum({"Generate": UNIT, "Wait": UNIT}),
        "Uid": {"uid_bytes": BYTES},
    }),
    "Join": Enum({
        "Hello": {
            "host": "text", "local_devices": BYTES, "gpus": Vec("text"), "libtorch": "text",
            "dataset_sig": DIGEST, "run_id": Since("0.8", Opt("text")),
            "nccl_version": Since("0.8", Opt(Tuple(("u32", "u32", "u32")))),
            "model_sig": Since("0.8", Opt(DIGEST)),
        },
        "Accept": {"ranks": Vec("u32"), "salt_hex": Opt("text"), "formation_wait_secs": "u64"},
        "Reject": {"reason": "text"},
        "WorldFormed": {"envelope_hex": "text", "relay_spec_hex": Opt("text")},
        "RankExited": {"rank": "u32", "code": "i32"},
        "Abort": {"reason": "text"},
    }),
    # Travels in mux records only, so it has no kind number.
    "Relay": Enum({
        "Hello": {"host": "text", "ranks": Vec("u32"), "model_sigs": Since("0.8", Vec(DIGEST))},
        "HelloAck": UNIT,
        "RankExit": {"rank": "u32"},
        "DeclareDead": {"rank": "u32"},
    }),
}



def at_revision(of: Any, revision: str) -> Any:
    """A type as it is at a revision, without what came later."""
    match of:
        case Since(_, inner):
            return at_revision(inner, revision)
        case Enum(variants):
            return Enum(at_revision(variants, revision))
        case Vec(inner) | Opt(inner) | Map(inner):
            return type(of)(at_revision(inner, revision))
        case dict():
            later = {name for name, inner in of.items() if isinstance(inner, Since) and inner.revision > revision}
            return {name: at_revision(inner, revision) for name, inner in of.items() if name not in later}
    return of


SCHEMAS = {
    revision: {kind: at_revision(of, revision) for kind, of in MESSAGES.items()} for revision in ("0.6", "0.7", "0.8")
}
SCHEMA = SCHEMAS["0.6"]

KINDS = {
    1: "Control", 2: "Timing", 3: "Metrics", 4: "ParamSnapshotMeta", 5: "Heartbeat", 6: "Rendezvous",
    7: "Join",
}
MUX_KINDS = {1: "Data", 2: "Control", 3: "HostFrame", 4: "Broadcast"}
ROUND_KINDS = {0: "Model", 1: "Control"}
SAVE_REASONS = [
    "GracefulShutdown", "MaxFailureExceeded", "SingleSurvivor", "AllRanksLost", "ReduceStall", "Checkpoint",
]

DATA_HELLO, DATA_ACK, CONTROL_HELLO, CONTROL_ACK, CONTROL_FRAME = range(0xF10D17C0, 0xF10D17C5)
MUX_RECORD, ROUND_FRAME = 0xF10D17D0, 0xF10D17F1
CONTROL_VERSIONS = {"0.6": 2, "0.7": 2, "0.8": 4}
DATA_VERSIONS = {"0.6": 2, "0.7": 2, "0.8": 3}
MUX_VERSION = 1
MAX_PAYLOAD, MAX_TENSORS, FRAME_CEILING = 16 << 20, 65536, 1 << 30
DTYPE_SIZES = {"0.6": {0: 4}, "0.7": {0: 4, 1: 2}, "0.8": {0: 4, 1: 2}}


# bincode: docs/wire.md §2.

LIMITS = {"u8": 1 << 8, "u16": 1 << 16, "u32": 1 << 32, "u64": 1 << 64}
WIDTHS = {0xFB: 2, 0xFC: 4, 0xFD: 8}


class Reader:
    """Bytes from the front of `data`; running out of them is an error named `short`."""

    def __init__(self, data: bytes, short: str):
        self.data, self.short, self.at = bytes(data), short, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        check(count <= self.left, self.short, f"{count} bytes wanted at offset {self.at}, {self.left} left")
        self.at += count
        return self.data[self.at - count:self.at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))


def single(value: float) -> float:
    """The nearest float32; beyond its range an infinity."""
    return array("f", [value])[0]


def put_varint(value: int) -> bytes:
    if value < 251:
        return bytes([value])
    lead, width = next((lead, width) for lead, width in WIDTHS.items() if value < 1 << 8 * width)
    return bytes([lead]) + value.to_bytes(width, "little")


def get_varint(r: Reader, limit: int) -> int:
    lead = r.take(1)[0]
    if lead < 251:
        return lead
    width = WIDTHS.get(lead, 16)
    check(limit >= 1 << 8 * width, "payload", f"varint lead {lead:#x} does not fit the type")
    return int.from_bytes(r.take(width), "little")


def integer(value: Json, low: int, end: int) -> Json:
    check(type(value) is int and low <= value < end, "value", f"{value!r} is no integer in {low}..{end - 1}")
    return value


def number(value: Json) -> float:
    check(type(value) in (int, float), "value", f"{value!r} is not a number")
    return float(value)


def typed(value: Json, kind: type) -> Json:
    check(isinstance(value, kind), "value", f"{value!r} is not a {kind.__name__}")
    return value


def variant(value: Json) -> tuple[str, Json]:
    """A variant's name and its fields, of `"Name"` or `{"Name": fields}`."""
    if isinstance(value, str):
        return value, {}
    check(isinstance(value, dict) and len(value) == 1, "value", f"{value!r} is not a variant")
    (name, fields), = value.items()
    return name, {} if fields is None else fields


def put(of: Any, value: Json) -> bytes:
    match of:
        case "u8":
            return bytes([integer(value, 0, LIMITS[of])])
        case "u16" | "u32" | "u64":
            return put_varint(integer(value, 0, LIMITS[of]))
        case "i32":
            value = integer(value, -1 << 31, 1 << 31)
            return put_varint(2 * value if value >= 0 else -2 * value - 1)
        case "f32":
            return struct.pack("<f", single(number(value)))
        case "f64":
            return struct.pack("<d", number(value))
        case "text":
            try:
                raw = typed(value, str).encode()
            except UnicodeEncodeError as error:
                raise WireError("value", str(error)) from None
            return put_varint(len(raw)) + raw
        case Opt(inner):
            return b"\0" if value is None else b"\1" + put(inner, value)
        case Vec(inner):
            return put_varint(len(typed(value, list))) + b"".join(put(inner, item) for item in value)
        case Map(inner):
            items = typed(value, dict).items()
            pairs = (put("text", key) + put(inner, item) for key, item in items)
            return put_varint(len(items)) + b"".join(pairs)
        case Array(inner, size):
            check(len(typed(value, list)) == size, "value", f"{len(value)} items, expected {size}")
            return b"".join(put(inner, item) for item in value)
        case Tuple(inner):
            check(len(typed(value, list)) == len(inner), "value", f"{len(value)} items, expected {len(inner)}")
            return b"".join(map(put, inner, value))
        case Enum(variants):
            name, fields = variant(value)
            check(name in variants, "value", f"no variant {name}")
            return put_varint(list(variants).index(name)) + put(variants[name], fields)
        case _:
            typed(value, dict)
            return b"".join(put(inner, value.get(name)) for name, inner in of.items())


def get(of: Any, r: Reader) -> Json:
    match of:
        case "u8":
            return r.take(1)[0]
        case "u16" | "u32" | "u64":
            return get_varint(r, LIMITS[of])
        case "i32":
            value = get_varint(r, LIMITS["u32"])
            return value >> 1 if value & 1 == 0 else -(value >> 1) - 1
        case "f32":  # As a double it keeps all its bits, save that a signalling NaN turns quiet.
            return r.unpack("<f")[0]
        case "f64":
            return r.unpack("<d")[0]
        case "text":
            try:
                return r.take(get("u64", r)).decode()
            except UnicodeDecodeError as error:
                raise WireError("payload", str(error)) from None
        case Opt(inner):
            tag = r.take(1)[0]
            check(tag < 2, "payload", f"option tag {tag}")
            return get(inner, r) if tag else None
        case Vec(inner):
            return [get(inner, r) for _ in range(get("u64", r))]
        case Map(inner):
            return {get("text", r): get(inner, r) for _ in range(get("u64", r))}
        case Array(inner, size):
            return [get(inner, r) for _ in range(size)]
        case Tuple(inner):
            return [get(part, r) for part in inner]
        case Enum(variants):
            index = get("u32", r)
            check(index < len(variants), "payload", f"variant {index} of {len(variants)}")
            name, inner = list(variants.items())[index]
            return name if inner == UNIT else {name: get(inner, r)}
        case _:
            return {name: get(inner, r) for name, inner in of.items()}


def encode_payload(kind: str, message: Json, revision: str = "0.6") -> bytes:
    """The bincode payload of a message; `kind` is a name in SCHEMA."""
    return put(SCHEMAS[revision][kind], message)


def decode_payload(kind: str, payload: bytes, revision: str = "0.6") -> tuple[Json, int]:
    """A message and how many bytes it took; those after it are the caller's business."""
    r = Reader(payload, "payload")
    return get(SCHEMAS[revision][kind], r), r.at


def to_json(value: Json) -> Json:
    """The same value as JSON carries it: NaN and the infinities become None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list():
            return [to_json(item) for item in value]
        case dict():
            return {key: to_json(item) for key, item in value.items()}
    return value


def one_byte_form(message: Json) -> bool:
    """Whether no map in a message has two entries, which the crate would write in an order of its own."""
    fields = message.get("EpochAggregated", message) if isinstance(message, dict) else {}
    return all(len(entries) < 2 for entries in (fields.get("scalars", {}), *fields.get("per_rank", ())))


# Control frames: docs/wire.md §3.

def parse_salt(text: str) -> bytes:
    """A session salt of 32 hex digits, spaces around them ignored."""
    check(re.fullmatch("[0-9a-fA-F]{32}", text.strip()) is not None, "value", "a salt is 32 hex digits")
    return bytes.fromhex(text.strip())


def mac8(salt: bytes, data: bytes) -> bytes:
    return hmac.digest(salt, data, "sha256")[:8]


def check_mac(salt: bytes, data: bytes, tag: bytes) -> None:
    check(hmac.compare_digest(mac8(salt, data), tag), "mac", "the tag does not match")


def number_of(name: str, names: dict[int, str]) -> int:
    return next(number for number, known in names.items() if known == name)


def encode_frame(salt: bytes, kind: str, message: Json, revision: str = "0.6") -> bytes:
    """A whole control frame; the message of a reserved kind is its payload."""
    payload = encode_payload(kind, message, revision) if kind in SCHEMA else message
    check(len(payload) <= MAX_PAYLOAD, "limit", f"a payload of {len(payload)} bytes")
    return sign_frame(salt, number_of(kind, KINDS), payload, revision)


def sign_frame(salt: bytes, kind: int, payload: bytes, revision: str = "0.6") -> bytes:
    """A control frame whose MAC holds, whatever its kind and payload."""
    signed = struct.pack("<II", kind, len(payload)) + payload
    return struct.pack("<II", CONTROL_FRAME, CONTROL_VERSIONS[revision]) + mac8(salt, signed) + signed


def decode_frame(salt: bytes, data: bytes, revision: str = "0.6") -> tuple[str, Json, int]:
    """Kind, message (a reserved kind's payload) and how many bytes are left after the frame."""
    r = Reader(data, "truncated")
    magic, version, tag, kind, size = r.unpack("<II8sII")
    check(magic == CONTROL_FRAME, "magic", f"{magic:#x}")
    check(version == CONTROL_VERSIONS[revision], "version", f"{version}")
    check(kind in KINDS, "kind", f"{kind}")
    check(size <= MAX_PAYLOAD, "limit", f"a payload of {size} bytes")
    payload = r.take(size)
    check_mac(salt, struct.pack("<II", kind, size) + payload, tag)
    name = KINDS[kind]
    return name, decode_payload(name, payload, revision)[0] if name in SCHEMA else payload, r.left


# Conversion: docs/wire.md §5.

def control_convert(message: Json) -> Json:
    """What becomes of a control message in a rank: `{"outcome": "message" | "none" | "error"}`, plus a save's
    `reason`."""
    name, fields = variant(message)
    if name in ("Update", "CoordHeartbeat"):
        return {"outcome": "none"}
    if fields.get("target_rank") == (1 << 64) - 1:
        return {"outcome": "error"}
    if name == "ShutdownWithSave":
        known = fields["reason"] < len(SAVE_REASONS)
        return {"outcome": "message", "reason": SAVE_REASONS[fields["reason"] if known else 0]}
    return {"outcome": "message"}


# Round frames: docs/wire.md §6.

def check_weight(weight: float, what: str) -> None:
    check(math.isfinite(weight) and weight >= 0, what, f"weight {weight}")


def check_tensor(index: int, tensor: Json, revision: str) -> int:
    """The number of values of a tensor that the revision has and whose shape and bytes agree."""
    sizes = DTYPE_SIZES[revision]
    check(tensor["dtype"] in sizes, "tensor", f"tensor {index}: dtype {tensor['dtype']}")
    values, size = math.prod(tensor["shape"]), len(tensor["bytes"]) // 2
    expected = values * sizes[tensor["dtype"]]
    elided = size == 0 and revision == "0.8"
    check(expected == size or elided, "tensor", f"tensor {index}: {size} bytes, expected {expected}")
    return values


def encode_round(salt: bytes, frame: Json, revision: str = "0.6") -> bytes:
    check_weight(frame["weight"], "value")
    check(len(frame["tensors"]) <= MAX_TENSORS, "limit", f"{len(frame['tensors'])} tensors")
    kind = number_of(frame["kind"], ROUND_KINDS)
    out = struct.pack("<IIBd", ROUND_FRAME, len(frame["tensors"]), kind, frame["weight"])
    for index, tensor in enumerate(frame["tensors"]):
        shape, raw = tensor["shape"], bytes.fromhex(tensor["bytes"])
        check_tensor(index, tensor, revision)
        check(len(shape) < 256, "tensor", f"tensor {index}: {len(shape)} dimensions")
        out += struct.pack(f"<BB{len(shape)}IQ", tensor["dtype"], len(shape), *shape, len(raw)) + raw
    return out + mac8(salt, out)


def decode_round(
    salt: bytes, data: bytes, ceiling: int = FRAME_CEILING, revision: str = "0.6"
) -> tuple[Json, int]:
    """A round frame and how many bytes are left after it."""
    r = Reader(data, "truncated")
    magic, count = r.unpack("<II")
    check(magic == ROUND_FRAME, "magic", f"{magic:#x}")
    check(count <= MAX_TENSORS, "limit", f"{count} tensors")
    kind, = r.unpack("<B")
    check(kind in ROUND_KINDS, "kind", f"{kind}")
    weight, = r.unpack("<d")
    check_weight(weight, "payload")
    tensors, total = [], 0
    for _ in range(count):
        dtype, ndim = r.unpack("<BB")
        *shape, size = r.unpack(f"<{ndim}IQ")
        total += size
        check(total <= ceiling, "limit", f"{total} tensor bytes")
        tensors.append({"dtype": dtype, "shape": shape, "bytes": r.take(size).hex()})
    signed = r.data[:r.at]
    check_mac(salt, signed, r.take(8))
    for index, tensor in enumerate(tensors):
        check_tensor(index, tensor, revision)
    return {"kind": ROUND_KINDS[kind], "weight": weight, "tensors": tensors}, r.left


def floats(tensor: Json) -> array[float]:
    """A tensor's values in float32; bfloat16 is its upper half, and what is elided is zero."""
    raw = bytes.fromhex(tensor["bytes"]) or bytes(math.prod(tensor["shape"]) * (2 if tensor["dtype"] else 4))
    if tensor["dtype"]:
        raw = b"".join(b"\0\0" + raw[at:at + 2] for at in range(0, len(raw), 2))
    return array("f", struct.unpack(f"<{len(raw) // 4}f", raw))


def rounded(bits: int) -> int:
    """A float32's bits to bfloat16's: to nearest, ties to even; a NaN keeps its upper half and turns quiet."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    upper, lower = divmod(bits, 1 << 16)
    return upper + (lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1))


def with_floats(tensor: Json, values: array[float]) -> Json:
    raw = struct.pack(f"<{len(values)}f", *values)
    if tensor["dtype"]:
        words = struct.unpack(f"<{len(values)}I", raw)
        raw = struct.pack(f"<{len(values)}H", *map(rounded, words))
    return {**tensor, "bytes": raw.hex()}


def sum_frames(frames: list[Json], revision: str = "0.8") -> Json:
    """The sum of frames that agree in everything but weight and values, added in list order from +0.0.

    What all of them elide stays elided.
    """
    check(bool(frames), "tensor", "no frame")
    first, weight = frames[0], -0.0  # which changes no other number: weights of -0.0 alone add up to -0.0
    sums = [array("f", bytes(4 * check_tensor(i, tensor, revision))) for i, tensor in enumerate(first["tensors"])]
    given = [False for _ in sums]
    for frame in frames:
        check(frame["kind"] == first["kind"], "tensor", "kinds differ")
        check(len(frame["tensors"]) == len(sums), "tensor", "tensor counts differ")
        weight += frame["weight"]
        rows = zip(sums, frame["tensors"], first["tensors"], strict=True)
        for index, (total, tensor, model) in enumerate(rows):
            for key in ("dtype", "shape"):
                check(tensor[key] == model[key], "tensor", f"tensor {index}: {key} differs")
            check_tensor(index, tensor, revision)
            given[index] = given[index] or tensor["bytes"] != ""
            # A double holds the exact sum of two float32 up to one rounding that cannot show after the next.
            for i, value in enumerate(floats(tensor)):
                total[i] += value
    rows = zip(first["tensors"], sums, given, strict=True)
    tensors = [with_floats(tensor, total) if there else tensor for tensor, total, there in rows]
    return {"kind": first["kind"], "weight": weight, "tensors": tensors}


def reduce_frames(frames: list[Json], revision: str = "0.8") -> Json:
    """The mean by weight of the frames that are not None; a Control frame or a total of 0 stays a sum."""
    total = sum_frames([frame for frame in frames if frame is not None], revision)
    if total["kind"] == "Model" and total["weight"] > 0:
        inverse = single(1.0 / total["weight"])
        total["tensors"] = [
            with_floats(t, array("f", [value * inverse for value in floats(t)])) if t["bytes"] else t
            for t in total["tensors"]
        ]
    return total


def plain_nans(frame: Json) -> Json:
    """A round frame with every NaN replaced by one, for comparisons across processors."""
    def plain(tensor: Json) -> Json:
        if not tensor["bytes"]:
            return tensor
        return with_floats(tensor, array("f", [math.nan if x != x else x for x in floats(tensor)]))

    return {**frame, "tensors": [plain(tensor) for tensor in frame["tensors"]]}


def gamma_mass(n: float, gamma: float = 1.0) -> float:
    if n <= 0:
        return 0.0
    try:
        return n if gamma == 1 else n ** gamma
    except OverflowError:
        return math.inf


def mover_mass(n: float) -> float:
    return 1.0 if n > 0 else 0.0


def is_realized(mass: float) -> bool:
    return mass > 0


# Handshakes, mux records, length framing: docs/wire.md §7.

def frame_ceiling(model_bytes: int) -> int:
    return min(max(64 << 20, 2 * model_bytes), (1 << 64) - 1)


def control_hello(salt: bytes, rank: int, world: int, model_sig: bytes = b"", revision: str = "0.6") -> bytes:
    """`model_sig` is the 32 bytes that 0.8 has."""
    check(len(model_sig) == (32 if revision == "0.8" else 0), "value", f"a model_sig of {len(model_sig)} bytes")
    signed = struct.pack("<IIII", CONTROL_HELLO, CONTROL_VERSIONS[revision], rank, world) + model_sig
    return signed + mac8(salt, signed)


def control_ack(salt: bytes, revision: str = "0.6") -> bytes:
    signed = struct.pack("<II", CONTROL_ACK, CONTROL_VERSIONS[revision])
    return signed + mac8(salt, signed)


def data_hello(rank: int, world: int, revision: str = "0.6") -> bytes:
    return struct.pack("<IIII", DATA_HELLO, DATA_VERSIONS[revision], rank, world)


def data_ack(revision: str = "0.6") -> bytes:
    return struct.pack("<II", DATA_ACK, DATA_VERSIONS[revision])


def read_greeting(data: bytes, layout: str, magic: int, version: int) -> tuple[Any, ...]:
    """The fields after the magic and the version."""
    r = Reader(data, "truncated")
    found, found_version = r.unpack("<II")
    check(found == magic, "magic", f"{found:#x}")
    check(found_version == version, "version", f"{found_version}")
    return r.unpack(layout)


def check_control_hello(salt: bytes, data: bytes, world: int, revision: str = "0.6") -> tuple[int, bytes]:
    """The rank that says hello, and its model's signature, empty before 0.8."""
    layout = "<II32s8s" if revision == "0.8" else "<II0s8s"
    rank, found, sig, tag = read_greeting(data, layout, CONTROL_HELLO, CONTROL_VERSIONS[revision])
    check(found == world, "world", f"{found}")
    check_mac(salt, data[:-8], tag)
    return rank, sig


def check_control_ack(salt: bytes, data: bytes, revision: str = "0.6") -> None:
    tag, = read_greeting(data, "<8s", CONTROL_ACK, CONTROL_VERSIONS[revision])
    check_mac(salt, data[:8], tag)


def check_data_hello(data: bytes, world: int, revision: str = "0.6") -> int:
    """The rank that says hello."""
    rank, found = read_greeting(data, "<II", DATA_HELLO, DATA_VERSIONS[revision])
    check(found == world, "world", f"{found}")
    return rank


def check_data_ack(data: bytes, revision: str = "0.6") -> None:
    read_greeting(data, "<", DATA_ACK, DATA_VERSIONS[revision])


def encode_mux(salt: bytes, record: Json, revision: str = "0.6") -> bytes:
    """A mux record of `{"record": its kind, "rank": of Data, "payload": hex or, of Control, "msg"}`."""
    kind = number_of(record["record"], MUX_KINDS)
    payload = encode_payload("Relay", record["msg"], revision) if "msg" in record else bytes.fromhex(record["payload"])
    header = struct.pack("<IIBII", MUX_RECORD, MUX_VERSION, kind, record.get("rank", 0), len(payload))
    return header + mac8(salt, header + payload) + payload


def decode_mux(
    salt: bytes, data: bytes, ceiling: int = FRAME_CEILING, revision: str = "0.6"
) -> tuple[Json, int]:
    """A mux record, its rank always given, and how many bytes are left after it."""
    r = Reader(data, "truncated")
    magic, version, kind, rank, size, tag = r.unpack("<IIBII8s")
    check(magic == MUX_RECORD, "magic", f"{magic:#x}")
    check(version == MUX_VERSION, "version", f"{version}")
    check(size <= ceiling, "limit", f"a payload of {size} bytes")
    payload = r.take(size)
    check_mac(salt, r.data[:17] + payload, tag)
    check(kind in MUX_KINDS, "kind", f"{kind}")
    name = MUX_KINDS[kind]
    record = {"record": name, "rank": rank}
    if name == "Control":
        return {**record, "msg": decode_payload("Relay", payload, revision)[0]}, r.left
    return {**record, "payload": payload.hex()}, r.left


def add_prefix(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def take_prefixed(data: bytes, ceiling: int = FRAME_CEILING) -> tuple[bytes, int]:
    """The first length-prefixed body and how many bytes are left after it."""
    r = Reader(data, "truncated")
    size, = r.unpack("<I")
    check(size <= ceiling, "limit", f"{size} bytes")
    return r.take(size), r.left


# Model signatures: docs/wire.md §7.

SIG_DTYPES = {"int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7, "bfloat16": 15}


def model_sig(parameters: list[tuple[str, str, list[int]]], buffers: list[tuple[str, str, list[int]]]) -> bytes:
    """Of (name, dtype, shape) of every parameter and buffer."""
    signed = b""
    for tag, entries in ((b"P", parameters), (b"B", buffers)):
        for name, dtype, shape in entries:
            signed += tag + name.encode() + b"\0" + struct.pack("<iI", SIG_DTYPES[dtype], len(shape))
            signed += b"".join(dim.to_bytes(8, "little", signed=True) for dim in shape)
    return hashlib.sha256(signed).digest()

"""The message classes: their layout against the oracle's schema, and how they behave as objects."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from enum import IntEnum

import pytest
import reference as ref
from support import CODEC, KIND_OF, UNIONS, Hook, bare, classes, crate_name, one_of_each, oracle_form

import flodl_fast as ff
from flodl_fast.layout import struct_of, variants_of
from flodl_fast.protocol import Revision

EVERY = one_of_each(3)
IDS = [type(message).__name__ for message in EVERY]


def payload(message):
    return CODEC.encode_payload(message)


def as_oracle_type(shape):
    """A wire type of the package in the oracle's words."""
    inner = [as_oracle_type(part) for part in shape.parts]
    match shape.op:
        case "str":
            return "text"
        case "bytes":
            return ref.BYTES
        case "fixed":
            return ref.Array("u8", shape.size)
        case "opt":
            return ref.Opt(*inner)
        case "list":
            return ref.Vec(*inner)
        case "tuple":
            return ref.Tuple(tuple(inner))
        case "map":
            assert inner[0] == "text"
            return ref.Map(inner[1])
        case "enum":
            return ref.Enum({bare(member): ref.UNIT for member in shape.cls})
        case "struct":
            marked = (
                part if since is None else ref.Since(since.value, part)
                for part, since in zip(inner, shape.since, strict=True)
            )
            return dict(zip(shape.names, marked, strict=True))
    return shape.op


@pytest.mark.parametrize("kind", UNIONS)
def test_variants_stand_in_the_order_of_the_wire(kind):
    assert [crate_name(cls) for cls in classes(UNIONS[kind])] == list(ref.SCHEMAS["0.8"][kind].variants)


@pytest.mark.parametrize("cls", KIND_OF, ids=lambda cls: cls.__name__)
def test_fields_are_those_of_the_oracle(cls):
    schema = ref.MESSAGES[KIND_OF[cls]]
    expected = schema.variants[crate_name(cls)] if isinstance(schema, ref.Enum) else schema
    if isinstance(expected, ref.Since):
        assert (cls, Revision(expected.revision)) in variants_of(UNIONS[KIND_OF[cls]])
        expected = expected.of
    fields = as_oracle_type(struct_of(cls))
    if isinstance(expected, ref.Enum) or list(expected) != list(fields):
        (fields,) = fields.values()  # the variant wraps a struct or an enum
    assert fields == expected
    if isinstance(expected, dict):
        assert list(fields) == list(expected)


@pytest.mark.parametrize("cls", [*KIND_OF, ff.EpochPlan, ff.EpochMetrics, ff.ResourceSample, ff.GpuSnapshot])
def test_messages_are_slotted_dataclasses(cls):
    assert dataclasses.is_dataclass(cls)
    assert "__dict__" not in vars(cls)
    assert cls.__slots__ == tuple(field.name for field in dataclasses.fields(cls))
    assert cls.__doc__
    assert cls.__module__ == "flodl_fast.messages"


@pytest.mark.parametrize(("enum", "members"), [
    (ff.MsgKind, "CONTROL=1 TIMING=2 METRICS=3 PARAM_SNAPSHOT_META=4 HEARTBEAT=5 RENDEZVOUS=6 JOIN=7"),
    (ff.RoundKind, "MODEL=0 CONTROL=1"),
    (ff.MuxKind, "DATA=1 CONTROL=2 HOST_FRAME=3 BROADCAST=4"),
    (ff.IntentKind, "EVAL_NOW=0 CHECKPOINT_NOW=1"),
    (ff.RendezvousRole, "GENERATE=0 WAIT=1"),
    (ff.SaveReason, "GRACEFUL_SHUTDOWN=0 MAX_FAILURE_EXCEEDED=1 SINGLE_SURVIVOR=2 ALL_RANKS_LOST=3 "
                    "REDUCE_STALL=4 CHECKPOINT=5"),
])
def test_enums_have_the_numbers_of_the_wire(enum, members):
    assert issubclass(enum, IntEnum)
    assert " ".join(f"{member.name}={member.value}" for member in enum) == members


def test_public_names():
    expected = {
        "Codec", "RoundFrame", "TensorLayout", "MuxRecord", "FrameReader", "Reserved", "Revision", "sum_frames",
        "reduce_frames", "gamma_mass", "mover_mass", "is_realized", "frame_ceiling", "timing_msg_to_wire",
        "control_wire_to_msg", "metrics_msg_to_wire", "epoch_metrics_to_wire", "epoch_metrics_from_wire",
        "from_json", "to_json", "EpochPlan", "EpochMetrics", "MetricsMsg", "ResourceSample", "GpuSnapshot",
        "MsgKind", "IntentKind", "RendezvousRole", "SaveReason", "RoundKind", "MuxKind",
        "FlodlError", "EncodeError", "DecodeError", "ReservedTargetError", "ChannelError",
        *(f"{kind}Msg" for kind in UNIONS), *(cls.__name__ for cls in KIND_OF),
    }
    assert expected <= set(ff.__all__)
    assert all(hasattr(ff, name) for name in ff.__all__)


def test_defaults_are_absent_or_empty_and_not_shared():
    assert ff.Update(7).next_plan is None
    assert ff.Batch(1, 2.0, 3.0, 4) == ff.Batch(1, 2.0, 3.0, 4, None, 0.0, None)
    one, other = ff.EpochMetrics(0), ff.EpochMetrics(0)
    one.scalars["loss"] = 1.0
    one.per_rank_throughput.append(1.0)
    assert other == ff.EpochMetrics(0)
    assert payload(ff.EpochAggregated(other)).hex() == "0f" + "000000" + "00" * 16 + "00" * 6


def test_messages_match_by_position():
    match ff.Heartbeat(3, 1000):
        case ff.Heartbeat(rank, steps):
            assert (rank, steps) == (3, 1000)
        case _:
            pytest.fail("Heartbeat did not match its own pattern")


@pytest.mark.parametrize("message", EVERY, ids=IDS)
@pytest.mark.parametrize("again", [
    copy.copy, copy.deepcopy, dataclasses.replace,
    *(lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)),
], ids=["copy", "deepcopy", "replace", *(f"pickle{p}" for p in range(2, pickle.HIGHEST_PROTOCOL + 1))])
def test_copies_are_equal_and_encode_alike(message, again):
    decoded = CODEC.decode_payload(KIND_OF[type(message)], payload(message))
    for original in (message, decoded):
        copied = again(original)
        assert copied is not original
        assert type(copied) is type(message)
        assert payload(copied) == payload(message)


def test_deep_copies_stand_alone():
    decoded = CODEC.decode_payload("Control", payload(ff.EpochAggregated(ff.EpochMetrics(1, {"a": 1.0}, [{"b": 2.0}]))))
    copied = copy.deepcopy(decoded)
    decoded.metrics.scalars.clear()
    decoded.metrics.per_rank[0]["b"] = 0.0
    assert copied.metrics == ff.EpochMetrics(1, {"a": 1.0}, [{"b": 2.0}])


def test_decoded_messages_are_as_made_ones():
    for message in one_of_each(4, finite=True):
        decoded = CODEC.decode_payload(KIND_OF[type(message)], payload(message))
        assert decoded == message
        assert oracle_form(decoded) == oracle_form(message)


def test_fields_of_a_decoded_message_can_be_replaced():
    decoded = CODEC.decode(CODEC.encode(ff.Batch(1, 2.0, 3.0, 4)))
    decoded.rank, decoded.param_norm, decoded.batch_loss = 5, 0.5, float("inf")
    assert CODEC.decode(CODEC.encode(decoded)) == ff.Batch(5, 2.0, 3.0, 4, 0.5, float("inf"))
    decoded.param_norm = None
    assert CODEC.decode(CODEC.encode(decoded)) == ff.Batch(5, 2.0, 3.0, 4, None, float("inf"))


def test_decoded_messages_outlive_collections():
    frames = CODEC.encode_many([m for m in EVERY if KIND_OF[type(m)] != "Relay"] * 20)
    decoded, _ = CODEC.decode_many(frames)
    for message in decoded[::3]:
        if dataclasses.fields(message):
            name = dataclasses.fields(message)[0].name
            setattr(message, name, getattr(message, name))
    gc.collect()
    assert CODEC.encode_many(decoded) == frames
    del decoded
    gc.collect()
    assert CODEC.encode_many(CODEC.decode_many(frames)[0]) == frames


def test_a_cycle_through_a_container_of_a_decoded_message_is_collected():
    class Marked(list):
        pass

    decoded = CODEC.decode_payload("Control", payload(ff.StageAdvisory([1], [(2, [(3, 4)])])))
    decoded.counts = Marked([decoded])
    gone = weakref.ref(decoded.counts)
    del decoded
    gc.collect()
    assert gone() is None


class WithDict(ff.Heartbeat):
    """Has a __dict__ besides the slots."""


class WithSlots(ff.Heartbeat):
    __slots__ = ("extra",)


@pytest.mark.parametrize("cls", [WithDict, WithSlots, type("Deeper", (WithDict,), {})])
def test_a_subclass_is_encoded_as_its_base(cls):
    message = cls(3, 1000)
    message.extra = "kept here"
    assert CODEC.encode(message) == CODEC.encode(ff.Heartbeat(3, 1000))
    assert CODEC.encode_many([message]) == CODEC.encode(message)
    assert ff.timing_msg_to_wire(message) is message


def test_a_subclass_of_a_struct_is_encoded_as_its_base():
    class Plan(ff.EpochPlan):
        pass

    assert payload(ff.StartEpoch(Plan(1, 2, 300))) == bytes.fromhex("030102fb2c01")


def test_a_field_without_a_value_is_named():
    message = ff.Heartbeat(1, 2)
    del message.step_count
    with pytest.raises(TypeError, match=r"Heartbeat\.step_count.*no value"):
        CODEC.encode(message)
    with pytest.raises(TypeError, match=r"StartEpoch\.plan\.epoch.*no value"):
        CODEC.encode(ff.StartEpoch(ff.EpochPlan.__new__(ff.EpochPlan)))


# Values whose own conversion code changes the message that is being encoded.

def test_a_list_that_shrinks_or_grows_while_it_is_encoded():
    for change in (list.clear, list.pop, lambda items: items.extend(range(1000))):
        counts = []
        counts += [Hook(lambda counts=counts, change=change: change(counts)), 2, 3]
        with pytest.raises(ff.EncodeError, match=r"StageAdvisory\.counts.*changed its length"):
            CODEC.encode(ff.StageAdvisory(counts))


def test_a_list_whose_items_are_swapped_while_it_is_encoded():
    counts = []
    counts += [Hook(lambda: counts.__setitem__(slice(None), [4, 5, 6])), 2, 3]
    assert CODEC.decode(CODEC.encode(ff.StageAdvisory(counts))).counts == [7, 5, 6]


def test_a_map_that_changes_while_it_is_encoded():
    for change in (dict.clear, lambda entries: entries.update((str(i), (0.0, i)) for i in range(1000))):
        scalars = {}
        scalars["a"] = (0.0, Hook(lambda scalars=scalars, change=change: change(scalars)))
        scalars["b"] = (1.0, 1)
        with pytest.raises(ff.EncodeError, match="changed its size"):
            CODEC.encode(ff.MetricsMsg(1, 2, scalars=scalars))


def test_a_map_that_swaps_its_names_while_it_is_encoded():
    """It keeps its size, but more names come by than were announced."""
    class Swap:
        dtype, shape = "float64", ()

        def __float__(self):
            scalars["late"] = scalars.pop("a")
            return 1.0

    scalars = {"a": 0.5, "b": Swap(), "c": 2.0}
    with pytest.raises(ff.EncodeError, match="changed its names"):
        CODEC.encode(ff.EpochAggregated(ff.EpochMetrics(1, scalars)))


def test_a_struct_that_is_dropped_while_it_is_encoded():
    message = ff.StartEpoch(ff.EpochPlan(0, 8, 9))

    def drop():
        message.plan = ff.EpochPlan(1, 1, 1)
        gc.collect()

    message.plan.epoch = Hook(drop)
    assert payload(message) == bytes([3, 7, 8, 9])
    assert payload(message) == bytes([3, 1, 1, 1])


def test_a_field_that_is_deleted_while_it_is_encoded():
    message = ff.Heartbeat(0, 1)
    message.rank = Hook(lambda: delattr(message, "step_count"))
    with pytest.raises(TypeError, match=r"Heartbeat\.step_count"):
        CODEC.encode(message)


def test_an_error_inside_a_value_is_passed_on():
    def fail():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        CODEC.encode(ff.Heartbeat(Hook(fail), 1))
    with pytest.raises(ZeroDivisionError, match="mine"):
        CODEC.encode_many([ff.Heartbeat(1, 1), ff.Heartbeat(Hook(fail), 1)])

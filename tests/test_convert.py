"""In-process and wire messages: the rules of docs/wire.md §5."""

from __future__ import annotations

import copy
from typing import get_args

import numpy as np
import pytest
from conftest import golden_params
from support import CODEC, Scalar, drawn

import flodl_fast as ff
from flodl_fast import convert

IN_PROCESS = get_args(ff.TimingMsg)[:11]
RESERVED = 2**64 - 1
TARGETED = [
    lambda rank: ff.Checkpoint(1, rank), lambda rank: ff.ExecuteEvalCallback(1, 2, rank),
    lambda rank: ff.SaveConsensusModel(rank),
]


def bits(message):
    """A message's payload, by which a NaN equals itself."""
    return CODEC.encode_payload(message)


@pytest.mark.parametrize("case", golden_params("convert"))
def test_convert_vectors(case):
    message = ff.from_json("Control", case["msg"], revision=case["revision"])
    if case["outcome"] == "error":
        with pytest.raises(ff.ReservedTargetError):
            ff.control_wire_to_msg(message)
        return
    converted = ff.control_wire_to_msg(message)
    assert ("none" if converted is None else "message") == case["outcome"]
    if "reason" in case:
        assert type(converted) is convert.ShutdownWithSave
        assert converted.reason.name.title().replace("_", "") == case["reason"]


@pytest.mark.parametrize("cls", get_args(ff.ControlMsg), ids=lambda cls: cls.__name__)
def test_every_control_message_has_its_in_process_form(cls):
    special = {
        ff.Update: None, ff.CoordHeartbeat: None, ff.DeclareDead: convert.DeclareDead(),
        ff.NewNcclSession: convert.NewNcclSession(),
    }
    met = [message for message in drawn(5, 100, kinds=("Control",)) if type(message) is cls]
    assert len(met) == 5
    for message in met:
        if getattr(message, "target_rank", 0) == RESERVED:
            continue
        before = copy.deepcopy(message)
        converted = ff.control_wire_to_msg(message)
        assert bits(message) == bits(before)
        if cls in special:
            assert converted == special[cls]
        elif cls is ff.ShutdownWithSave:
            assert converted == convert.ShutdownWithSave(ff.SaveReason(message.reason if message.reason < 6 else 0))
        else:
            assert converted is message
        if converted is not None:
            assert isinstance(converted, get_args(convert.InProcessControlMsg))


def test_every_byte_is_a_save_reason():
    for reason in range(256):
        known = ff.SaveReason(reason) if reason < 6 else ff.SaveReason.GRACEFUL_SHUTDOWN
        assert ff.control_wire_to_msg(ff.ShutdownWithSave(reason)) == convert.ShutdownWithSave(known)


@pytest.mark.parametrize("three", [np.uint8(3), np.int64(3), np.array(3), Scalar(3, "torch.uint8")])
def test_a_save_reason_may_be_an_array_scalar(three):
    converted = ff.control_wire_to_msg(ff.ShutdownWithSave(three))
    assert converted == convert.ShutdownWithSave(ff.SaveReason.ALL_RANKS_LOST)


@pytest.mark.parametrize("make", TARGETED)
def test_the_reserved_target_is_refused(make):
    for rank in (RESERVED, np.uint64(RESERVED), np.array(RESERVED, np.uint64), Scalar(RESERVED, "torch.uint64")):
        with pytest.raises(ff.ReservedTargetError, match=r"target_rank.*2\*\*64 - 1.*reserves") as caught:
            ff.control_wire_to_msg(make(rank))
        assert type(make(0)).__name__ in str(caught.value)
    message = make(RESERVED - 1)
    assert ff.control_wire_to_msg(message) is message
    with pytest.raises(ff.EncodeError, match="target_rank"):
        ff.control_wire_to_msg(make(np.int64(-1)))


def test_only_targets_are_reserved():
    for message in (ff.SetEpochCallbackRole(RESERVED), ff.SetGlobalStep(RESERVED), ff.EvalBroadcast(RESERVED, 0.5)):
        assert ff.control_wire_to_msg(message) is message


@pytest.mark.parametrize("cls", IN_PROCESS, ids=lambda cls: cls.__name__)
def test_timing_messages_are_the_same_objects(cls):
    met = [message for message in drawn(6, 150, kinds=("Timing",)) if type(message) is cls]
    assert len(met) == 10
    for message in met:
        before = bits(message)
        assert ff.timing_msg_to_wire(message) is message
        assert bits(message) == before


@pytest.mark.parametrize("value", [
    ff.DashboardRegister(1, 8080), ff.DashboardSetSvg(1, ""), ff.DashboardSetMetadata(1, "{}"),
    ff.DashboardSetHardware(1, ""), ff.Shutdown(), ff.MetricsMsg(1, 2), convert.DeclareDead(), None, {}, ff.Heartbeat,
])
def test_what_is_no_in_process_timing_message(value):
    with pytest.raises(TypeError, match="is not an in-process Timing message"):
        ff.timing_msg_to_wire(value)


@pytest.mark.parametrize("value", [
    ff.Heartbeat(1, 2), ff.EpochMetrics(1), convert.DeclareDead(), convert.ShutdownWithSave(ff.SaveReason.CHECKPOINT),
    ff.Reserved(4, b""), None, "Shutdown",
])
def test_what_is_no_control_message(value):
    with pytest.raises(TypeError, match="is not a Control message"):
        ff.control_wire_to_msg(value)


def test_metrics_leave_their_resources_behind():
    sample = ff.ResourceSample(cpu_percent=12.5, gpus=[ff.GpuSnapshot(0, "gpu")])
    message = ff.MetricsMsg(1, 2, 0.5, 3, 4.0, 96, 5.0, 6.0, 7.0, {"loss": (1.5, 3)}, sample)
    converted = ff.metrics_msg_to_wire(message)
    assert converted == ff.MetricsMsg(1, 2, 0.5, 3, 4.0, 96, 5.0, 6.0, 7.0, {"loss": (1.5, 3)}, None)
    assert message.resources is sample
    assert converted is not message
    assert ff.metrics_msg_to_wire(ff.MetricsMsg(1, 2)) == ff.MetricsMsg(1, 2)


def test_epoch_metrics_convert_both_ways():
    for message in drawn(7, 200, kinds=("Control",), entries=4):
        if isinstance(message, ff.EpochAggregated):
            before = bits(message)
            assert ff.epoch_metrics_to_wire(message.metrics) is message.metrics
            assert ff.epoch_metrics_from_wire(message.metrics) is message.metrics
            assert bits(message) == before


@pytest.mark.parametrize("call", [
    ff.metrics_msg_to_wire, ff.epoch_metrics_to_wire, ff.epoch_metrics_from_wire,
])
def test_what_is_no_metrics(call):
    other = ff.EpochMetrics(1) if call is ff.metrics_msg_to_wire else ff.MetricsMsg(1, 2)
    for value in (other, ff.EpochAggregated(ff.EpochMetrics(1)), None, {}):
        with pytest.raises(TypeError, match=r"expected (MetricsMsg|EpochMetrics), got"):
            call(value)


@pytest.mark.parametrize(("value", "error"), [
    (-1, ff.EncodeError), (2**64, ff.EncodeError), pytest.param(10**5000, ff.EncodeError, id="huge"),
    (np.int64(-1), ff.EncodeError),
    (1.5, TypeError), (1.0, TypeError), ("1", TypeError), (True, TypeError), (None, TypeError), (b"1", TypeError),
    (np.float64(1), TypeError), (np.bool_(True), TypeError), (np.array([1]), TypeError),
])
@pytest.mark.parametrize(("convert_one", "field"), [
    (lambda value: ff.timing_msg_to_wire(ff.Heartbeat(value, 0)), r"Heartbeat\.rank"),
    (lambda value: ff.timing_msg_to_wire(ff.Batch(0, 1.0, 1.0, value)), r"Batch\.step_count"),
    (lambda value: ff.control_wire_to_msg(ff.SetGlobalStep(value)), r"SetGlobalStep\.global_step"),
    (lambda value: ff.control_wire_to_msg(ff.Update(value)), r"Update\.version"),
    (lambda value: ff.control_wire_to_msg(ff.DeclareDead(value)), r"DeclareDead\.rank"),
    (lambda value: ff.control_wire_to_msg(ff.StageAdvisory([0, value])), r"StageAdvisory\.counts\[1\]"),
    (lambda value: ff.control_wire_to_msg(ff.StartEpoch(ff.EpochPlan(0, value, 0))),
     r"StartEpoch\.plan\.partition_offset"),
    (lambda value: ff.metrics_msg_to_wire(ff.MetricsMsg(0, 0, scalars={"a": (1.0, value)})),
     r"MetricsMsg\.scalars\['a'\]\[1\]"),
    (lambda value: ff.epoch_metrics_to_wire(ff.EpochMetrics(value)), r"metrics\.epoch"),
    (lambda value: ff.epoch_metrics_from_wire(ff.EpochMetrics(value)), r"metrics\.epoch"),
])
def test_conversions_check_what_the_wire_can_carry(convert_one, field, value, error):
    with pytest.raises(error, match=field):
        convert_one(value)


def test_array_scalars_pass_and_stay_what_they_are():
    message = ff.Heartbeat(np.uint32(3), np.int64(1000))
    assert ff.timing_msg_to_wire(message) is message
    assert type(message.rank) is np.uint32
    assert bits(message).hex() == "0503fbe803"

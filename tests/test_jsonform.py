"""The crate's JSON form: what to_json writes and what from_json takes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import reference as ref
from conftest import golden_params, same
from generate import messages
from support import KIND_OF, MESSAGE_FILES, codec_at, drawn, one_of_each, oracle_form

import flodl_fast as ff

LR = {"LrUpdate": {"rank": 1, "lr": 0.5}}


@pytest.mark.parametrize("case", golden_params(*MESSAGE_FILES))
def test_json_vectors(case):
    revision = case["revision"]
    message = codec_at(revision).decode_payload(case["kind"], bytes.fromhex(case["payload"]))
    written = ff.to_json(message, revision=revision)
    assert same(written, case["msg"])
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    if "null" not in json.dumps(case["msg"]):
        again = ff.from_json(case["kind"], case["msg"], revision=revision)
        assert again == message
        assert type(again) is type(message)


def test_messages_of_every_kind_both_ways(revision):
    for kind, value in messages(41, 1000, entries=4, kinds=tuple(ref.SCHEMA), revision=revision):
        message = ff.from_json(kind, value, revision=revision)
        assert KIND_OF[type(message)] == kind
        assert same(oracle_form(message, revision), (kind, value))
        assert same(ff.to_json(message, revision=revision), ref.to_json(value))
        assert codec_at(revision).encode_payload(message) == ref.encode_payload(kind, value, revision)


def test_field_order_is_that_of_the_wire():
    for message in one_of_each(42):
        written = ff.to_json(message)
        _, form = oracle_form(message)
        assert json.dumps(written) == json.dumps(ref.to_json(form))


@pytest.mark.parametrize(("message", "written"), [
    (ff.SyncNow(), "SyncNow"), (ff.RelayHelloAck(), "HelloAck"),
    (ff.Heartbeat(3, 1000), {"Heartbeat": {"rank": 3, "step_count": 1000}}),
    (ff.StartEpoch(ff.EpochPlan(1, 2, 3)), {"StartEpoch": {"epoch": 1, "partition_offset": 2, "partition_size": 3}}),
    (ff.Update(7), {"Update": {"version": 7, "next_plan": None}}),
    (ff.Intent(0, ff.IntentKind.CHECKPOINT_NOW), {"Intent": {"rank": 0, "kind": "CheckpointNow"}}),
    (ff.RendezvousRoleMsg(ff.RendezvousRole.WAIT), {"Role": "Wait"}),
    (ff.RendezvousUid(b"\0\xff"), {"Uid": {"uid_bytes": [0, 255]}}),
    (ff.StageAdvisory([1], [(2, [(3, 4)])]), {"StageAdvisory": {"counts": [1], "segments": [[2, [[3, 4]]]]}}),
    (ff.LrUpdate(0, math.nan), {"LrUpdate": {"rank": 0, "lr": None}}),
    (ff.SyncAck(0, 1, -math.inf, 0.5), {"SyncAck": {"rank": 0, "step_count": 1, "divergence": None, "post_norm": 0.5,
                                                   "pre_norm": None}}),
    (ff.Heartbeat(np.uint8(3), np.int64(5)), {"Heartbeat": {"rank": 3, "step_count": 5}}),
    (ff.LrUpdate(0, np.float32(0.5)), {"LrUpdate": {"rank": 0, "lr": 0.5}}),
    (ff.LrUpdate(0, 3), {"LrUpdate": {"rank": 0, "lr": 3.0}}),
])
def test_forms(message, written):
    assert same(ff.to_json(message), written)
    if "None" not in str(written):
        assert ff.from_json(KIND_OF[type(message)], written) == message


@pytest.mark.parametrize("value", [None, 5, {}, "SyncNow", ff.EpochPlan(1, 2, 3), ff.Reserved(4, b""), ff.Heartbeat])
def test_what_has_no_json_form(value):
    with pytest.raises(TypeError, match=r"is not a message of revision 0\.6"):
        ff.to_json(value)


def test_a_subclass_is_written_as_its_base():
    class Mine(ff.Heartbeat):
        pass

    assert ff.to_json(Mine(3, 1000)) == {"Heartbeat": {"rank": 3, "step_count": 1000}}


@pytest.mark.parametrize("kind", [ff.MsgKind.TIMING, 2, np.int64(2), "Timing"])
def test_kinds_by_any_name(kind):
    assert ff.from_json(kind, LR) == ff.LrUpdate(1, 0.5)


@pytest.mark.parametrize("kind", [
    4, 5, "Heartbeat", "ParamSnapshotMeta", ff.MsgKind.HEARTBEAT, 0, 8, "timing", None, True,
])
def test_kinds_without_messages(kind):
    with pytest.raises(ff.UnknownKindError):
        ff.from_json(kind, LR)


@pytest.mark.parametrize("wrong", ["0.5", "0.9", None])
def test_revisions_that_are_not_spoken(wrong):
    for call in (
        lambda: ff.from_json("Timing", LR, revision=wrong), lambda: ff.to_json(ff.SyncNow(), revision=wrong),
    ):
        with pytest.raises(ValueError, match=r"not supported; supported: '0\.6', '0\.7', '0\.8'"):
            call()


@pytest.mark.parametrize(("kind", "value", "message"), [
    ("Control", {"SyncNow": None}, ff.SyncNow()),
    ("Control", {"Update": {"version": 7}}, ff.Update(7)),
    ("Control", {"Update": {"version": 7, "next_plan": None, "unknown": [1]}}, ff.Update(7)),
    ("Timing", {"LrUpdate": {"rank": 1, "lr": 2}}, ff.LrUpdate(1, 2.0)),
    ("Timing", {"LrUpdate": {"lr": 0.5, "rank": 1}}, ff.LrUpdate(1, 0.5)),
    ("Join", {"RankExited": {"rank": 0, "code": -1}}, ff.JoinRankExited(0, -1)),
])
def test_what_is_taken(kind, value, message):
    assert ff.from_json(kind, value) == message


def test_singles_are_rounded_when_they_are_read():
    value = {"rank": 0, "epoch": 0, "avg_loss": 0, "batches_processed": 0, "epoch_ms": 0, "samples_processed": 0,
             "share_complete_ms": 0, "compute_only_ms": 0, "data_starve_ms": 0, "scalars": {},
             "resources": {"cpu_percent": 0.1, "gpu_util_percent": 1e39, "gpus": []}}
    sample = ff.from_json("Metrics", value).resources
    assert (sample.cpu_percent, sample.gpu_util_percent) == (float(np.float32(0.1)), math.inf)


@pytest.mark.parametrize(("kind", "value", "text"), [
    ("Timing", "Nothing", "unknown variant 'Nothing'"), ("Timing", {"SyncNow": None}, "unknown variant 'SyncNow'"),
    ("Timing", None, "a variant's name"), ("Timing", 5, "a variant's name"), ("Timing", [], "a variant's name"),
    ("Timing", {}, "a variant's name"), ("Timing", {"Exiting": {"rank": 1}, "Heartbeat": {}}, "a variant's name"),
    ("Timing", "Heartbeat", "Heartbeat: expected an object"),
    ("Timing", ' {"Exiting": {"rank": 3}}', "got its text"), ("Metrics", "{}", "got its text"),
    ("Timing", {"Heartbeat": 5}, "Heartbeat: expected an object"),
    ("Timing", {"Heartbeat": {"rank": 1}}, "Heartbeat.step_count is missing"),
    ("Timing", {"Heartbeat": {"rank": None, "step_count": 1}}, "Heartbeat.rank: expected an integer"),
    ("Timing", {"Heartbeat": {"rank": -1, "step_count": 1}}, "Heartbeat.rank: expected an integer from 0"),
    ("Timing", {"Heartbeat": {"rank": 2**64, "step_count": 1}}, "Heartbeat.rank: expected an integer from 0"),
    ("Timing", {"Heartbeat": {"rank": 1.0, "step_count": 1}}, "Heartbeat.rank: expected an integer"),
    ("Timing", {"Heartbeat": {"rank": True, "step_count": 1}}, "Heartbeat.rank: expected an integer"),
    ("Timing", {"Heartbeat": {"rank": "1", "step_count": 1}}, "Heartbeat.rank: expected an integer"),
    ("Timing", {"LrUpdate": {"rank": 1, "lr": None}}, "LrUpdate.lr: expected a number"),
    ("Timing", {"LrUpdate": {"rank": 1, "lr": "0.5"}}, "LrUpdate.lr: expected a number"),
    ("Timing", {"LrUpdate": {"rank": 1, "lr": True}}, "LrUpdate.lr: expected a number"),
    ("Timing", {"Intent": {"rank": 1, "kind": "Sleep"}}, "Intent.kind: expected one of"),
    ("Timing", {"Intent": {"rank": 1, "kind": 0}}, "Intent.kind: expected one of"),
    ("Timing", {"DashboardRegister": {"rank": 1, "port": 65536}}, "DashboardRegister.port: expected an integer"),
    ("Timing", {"DashboardSetMetadata": {"rank": 1, "json": 5}}, "DashboardSetMetadata.json: expected text"),
    ("Timing", {"NewNcclIdGenerated": {"rank": 1, "uid_bytes": [256]}},
     "NewNcclIdGenerated.uid_bytes: expected a list"),
    ("Timing", {"NewNcclIdGenerated": {"rank": 1, "uid_bytes": [True]}},
     "NewNcclIdGenerated.uid_bytes: expected a list"),
    ("Timing", {"NewNcclIdGenerated": {"rank": 1, "uid_bytes": "00"}}, "NewNcclIdGenerated.uid_bytes: expected a list"),
    ("Control", {"SyncNow": {"rank": 1}}, "SyncNow has no fields"),
    ("Control", {"SyncNow": 0}, "SyncNow has no fields"),
    ("Control", {"StartEpoch": None}, "StartEpoch: expected an object"),
    ("Control", {"StartEpoch": {"epoch": 1}}, "StartEpoch.partition_offset is missing"),
    ("Control", {"StageAdvisory": {"counts": {}, "segments": []}}, "StageAdvisory.counts: expected a list"),
    ("Control", {"StageAdvisory": {"counts": [1, None], "segments": []}},
     "StageAdvisory.counts[1]: expected an integer"),
    ("Control", {"StageAdvisory": {"counts": [], "segments": [[1, [[2]]]]}},
     "StageAdvisory.segments[0][1][0]: expected"),
    ("Rendezvous", {"Hello": {"dataset_sig": [0] * 31, "global_rank": 0, "host_name": ""}},
     "Hello.dataset_sig: expected a list of 32"),
    ("Rendezvous", {"Role": "Sleep"}, "Role: expected one of"),
    ("Metrics", "Metrics", "expected an object"), ("Metrics", {}, "rank is missing"),
    ("Metrics", None, "expected an object"),
    ("Join", {"Accept": {"ranks": [], "formation_wait_secs": 2**70}},
     "Accept.formation_wait_secs: expected an integer"),
])
def test_what_is_refused(kind, value, text):
    with pytest.raises(ff.EncodeError) as caught:
        ff.from_json(kind, value)
    assert text in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [
    ("rank", 10**5000), ("lr", 10**400), ("lr", 10**5000), ("lr", [10**5000]),
], ids=["rank", "lr", "longer lr", "list"])
def test_numbers_beyond_all_measure_are_refused(field, value):
    with pytest.raises(ff.EncodeError, match=rf"LrUpdate\.{field}"):
        ff.from_json("Timing", {"LrUpdate": {"rank": 1, "lr": 0.5, field: value}})


def test_maps_name_the_key_at_fault():
    metrics = ff.to_json(ff.EpochAggregated(ff.EpochMetrics(1, {"a": 1.0}, [{"b": 2.0}])))
    metrics["EpochAggregated"]["per_rank"][0]["b"] = None
    with pytest.raises(ff.EncodeError, match=r"EpochAggregated\.per_rank\[0\]\['b'\]: expected a number, got None"):
        ff.from_json("Control", metrics)


def test_what_is_read_shares_nothing_with_the_json():
    value = {"StageAdvisory": {"counts": [1], "segments": []}}
    message = ff.from_json("Control", value)
    value["StageAdvisory"]["counts"].append(2)
    assert message == ff.StageAdvisory([1])
    written = ff.to_json(message)
    written["StageAdvisory"]["counts"].append(3)
    assert message == ff.StageAdvisory([1])


def test_json_text_survives():
    for message in drawn(43, 300, finite=True, entries=3):
        text = json.dumps(ff.to_json(message), allow_nan=False)
        assert ff.from_json(KIND_OF[type(message)], json.loads(text)) == message

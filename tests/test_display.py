"""What objects say of themselves: one line each, tables in a notebook, nothing secret, nothing unescaped."""

from __future__ import annotations

import html.parser
import io
import socket

import numpy as np
import pytest
from conftest import SALT
from support import one_of_each
from worker_support import Coordinator, Running

import flodl_fast as ff
from flodl_fast.capture import CaptureWriter, Direction, read_capture
from flodl_fast.channel import ControlChannel, accept
from flodl_fast.inspection import inspect_frames
from flodl_fast.local import LocalResult
from flodl_fast.notebook import Capture

CODEC = ff.Codec(SALT)
BATCH = ff.Batch(rank=3, batch_ms=1.5, data_ms=0.5, step_count=9)


class Cells(html.parser.HTMLParser):
    """The texts of a table, and the tags it has."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        assert not attributes
        self.tags.add(tag)

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data)


def captured(tmp_path, leg="rank 0 control", frames=None):
    path = tmp_path / "run.cap"
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for i, frame in enumerate(frames or [CODEC.encode(BATCH)]):
            writer.write(frame, leg, Direction.UP, time_ns=10**9 + i * 10**6)
    return path


def test_messages_show_their_fields():
    assert repr(BATCH) == (
        "Batch(rank=3, batch_ms=1.5, data_ms=0.5, step_count=9, param_norm=None, batch_loss=0.0, sync_divergence=None)"
    )
    assert repr(ff.StartEpoch(ff.EpochPlan(1, 2, 3))) == (
        "StartEpoch(plan=EpochPlan(epoch=1, partition_offset=2, partition_size=3))"
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_message_takes_one_line(seed):
    for message in one_of_each(seed):
        assert "\n" not in repr(message)
        assert repr(message).startswith(type(message).__name__ + "(")


def test_long_values_are_abbreviated():
    svg = repr(ff.DashboardSetSvg(0, "<svg>" + "x" * 10**6))
    assert len(svg) < 200
    assert svg.startswith("DashboardSetSvg(rank=0, svg='<svg>xxx")
    session = ff.NewNcclSession(bytes(128), 1, 2)
    assert repr(session) == "NewNcclSession(uid_bytes=<128 bytes>, new_rank=1, new_world_size=2)"
    many = ff.EpochAggregated(ff.EpochMetrics(4, {f"scalar {i}": 0.5 for i in range(10**4)}))
    assert repr(many).startswith("EpochAggregated(metrics=EpochMetrics(epoch=4, scalars={'scalar 0': 0.5, ")
    assert len(repr(many)) < 500
    record = ff.MuxRecord(ff.MuxKind.HOST_FRAME, payload=bytes(10**6))
    assert repr(record) == "MuxRecord(kind=<MuxKind.HOST_FRAME: 3>, rank=0, payload=<1000000 bytes>)"


def test_the_codec_hides_its_salt():
    assert repr(CODEC).startswith("Codec(<salt>, revision='0.6', ")
    assert SALT.hex() not in repr(CODEC)
    assert "lenient" not in repr(CODEC)
    assert repr(ff.Codec(SALT, lenient=True)).endswith(", lenient=True)")


def test_channels_and_the_worker():
    coordinator = Coordinator()
    with coordinator.serving([np.zeros(2, np.float32)], world=3) as worker:
        assert repr(worker) == "Worker(rank 0 of 3, 0 steps, running)"
        assert repr(coordinator.control) == "ControlChannel(rank 0 of 3, host 'here', revision 0.6, open)"
        coordinator.send(ff.Shutdown())
        assert list(worker.plans()) == []
        assert repr(worker) == "Worker(rank 0 of 3, 0 steps, ended by Shutdown())"
    coordinator.close()
    assert repr(coordinator.data) == "DataChannel(rank 0 of 3, host 'here', revision 0.6, closed)"


def test_the_cluster_and_its_result():
    cluster = ff.LocalCluster(2, 64, 8, 1)
    assert repr(cluster) == "LocalCluster(2 ranks, not started, at 127.0.0.1:0)"
    with cluster:
        assert repr(cluster) == f"LocalCluster(2 ranks, running, at 127.0.0.1:{cluster.address[1]})"
    assert repr(cluster).split(", ")[1] == "over"
    assert cluster.salt.hex() not in repr(cluster)
    assert len(repr(LocalResult([ff.EpochMetrics(i) for i in range(100)]))) < 4000


def test_a_layout_is_a_table():
    layout = ff.TensorLayout.of([np.zeros((2, 3), np.float32), np.zeros((), np.float32)])
    cells = Cells(layout._repr_html_())
    assert cells.tags == {"table", "caption", "tr", "th", "td"}
    assert cells.texts == [
        repr(layout), "tensor", "dtype", "shape", "bytes", "offset",
        "0", "float32", "(2, 3)", "24", "35", "1", "float32", "()", "4", "69",
    ]


def test_a_long_layout_is_cut():
    layout = ff.TensorLayout.of([np.zeros(1, np.float32)] * 3000)
    assert layout._repr_html_().count("<tr>") == 51
    assert "3000 tensors" in layout._repr_html_()


def test_a_capture_is_a_table(tmp_path):
    path = captured(tmp_path, frames=[CODEC.encode(BATCH), CODEC.encode(ff.SnapshotReady(3))])
    capture = Capture(path, SALT)
    assert repr(capture) == f"Capture({str(path)!r}, 2 frames, {capture_bytes(path)} bytes, 1 leg)"
    assert Cells(capture._repr_html_()).texts[9:] == [
        "0", "0.000000", "rank 0 control", "up", "Timing Batch", "3", str(len(CODEC.encode(BATCH))), "ok",
        "1", "0.001000", "rank 0 control", "up", "Timing SnapshotReady", "3", "26", "ok",
    ]
    assert [entry.name for entry in capture] == ["Batch", "SnapshotReady"]
    assert SALT.hex() not in repr(capture) + capture._repr_html_()


def capture_bytes(path):
    with path.open("rb") as file:
        return sum(len(record.data) for record in read_capture(file))


def test_a_capture_with_faults(tmp_path):
    frame = bytearray(CODEC.encode(BATCH))
    frame[-1] ^= 1
    path = captured(tmp_path, frames=[frame])
    assert repr(Capture(path, SALT)).endswith("1 leg, 1 faulty)")
    assert "BAD" in Cells(Capture(path, SALT)._repr_html_()).texts
    path.write_bytes(path.read_bytes()[:-3])
    assert "0 frames, 0 bytes, then no frame: the file ends inside a frame" in repr(Capture(path, SALT))


def test_what_comes_off_the_network_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    path = captured(tmp_path, leg=evil)
    cells = Cells(Capture(path)._repr_html_())
    assert cells.tags == {"table", "caption", "tr", "th", "td"}
    assert evil in cells.texts


def test_records_and_entries(tmp_path):
    path = captured(tmp_path)
    with path.open("rb") as file:
        record = next(read_capture(file))
    size = len(record.data)
    assert repr(record) == f"Record({size} bytes up on 'rank 0 control' at 1.000000 s, offset {record.offset})"
    entry = next(inspect_frames(io.BytesIO(CODEC.encode(BATCH)), salt=SALT))
    assert repr(entry) == f"Entry(control Timing Batch, {size} bytes at 0, MAC ok)"


def test_a_rank_s_own_end_of_a_channel():
    near, far = socket.socketpair()
    with far:
        served = Running(accept, far, CODEC, 2)
        with ControlChannel.connect(near, CODEC, 1, 2) as channel:
            assert repr(channel) == "ControlChannel(rank 1 of 2, revision 0.6, open)"
            served.result().close()

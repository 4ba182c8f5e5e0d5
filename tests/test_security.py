"""What docs/security.md promises: the salt shows nowhere, and a public peer is warned of."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import socket
import subprocess
import sys
import traceback
import warnings
from contextlib import suppress

import numpy as np
import pytest
from channel_support import CODEC, HOST, WAIT, WORLD, Flavour, exactly, greeting, running
from local_support import AGENT

import flodl_fast as ff
from flodl_fast import channel, cli, net
from flodl_fast.capture import CaptureWriter, Direction
from flodl_fast.environment import CLUSTER, HOST_NAME, LOCAL_RANK, Environment
from flodl_fast.worker import Worker

SALT = bytes.fromhex("a1b2c3d4e5f60718293a4b5c6d7e8f90")  # found in no other bytes or text by chance
FORMS = (SALT.hex(), SALT.hex(" "), SALT.hex(":"), repr(SALT)[2:-1], repr(list(SALT))[1:-1], repr(bytearray(SALT)))


def shows_salt(*shown: object) -> bool:
    """Whether any of these holds the salt: as bytes, or in a form that Python writes bytes in."""
    raw = b"".join(part if isinstance(part, bytes) else str(part).encode() for part in shown)
    return SALT in raw or any(form.encode().lower() in raw.lower() for form in FORMS)


def failure(call, *args, **keywords) -> str:
    """All that an exception shows: its repr, its attributes, the traceback with its causes."""
    try:
        call(*args, **keywords)
    except Exception as error:
        seen = [error]
        while (cause := seen[-1].__cause__ or seen[-1].__context__) is not None:
            seen.append(cause)
        return traceback.format_exc() + "".join(f"{error!r} {error.args} {vars(error)}" for error in seen)
    raise AssertionError("nothing was raised")


def envelope(salt: object) -> str:
    worker = {"host": "north", "ranks": [0, 1], "local_devices": [0, 1], "nccl_socket_ifname": "", "path": "."}
    cluster = {"controller": {"host": "127.0.0.1", "port": 7000}, "world_size": 2, "num_workers": 1, "worker": worker}
    return json.dumps({**cluster, "salt": salt}).encode().hex()


def environ(salt: object = SALT.hex()) -> dict[str, str]:
    return {CLUSTER: envelope(salt), LOCAL_RANK: "0", HOST_NAME: "north"}


def test_the_forms_are_found():
    assert all(shows_salt(form) for form in (SALT, SALT.hex().upper(), repr(SALT), [SALT], list(SALT), f"<{FORMS[2]}>"))
    assert not shows_salt(SALT[:15], "no salt")


# ------------------------------------------------------------------------------------------------------- the salt


def test_objects_do_not_show_it():
    codec = ff.Codec(SALT)
    near, far = socket.socketpair()
    with near, far:
        link = running(channel.accept, near, codec, 1)
        far.sendall(codec.control_hello(0, 1))
        with link.result(WAIT) as end:
            objects = [
                codec, end, ff.FrameReader(codec, "control"), ff.FrameWriter(codec, "mux"), Environment.read(environ()),
                ff.LocalCluster(1, 1, 1, 1, salt=SALT), ff.JoinAccept([0], SALT.hex(), 60),
                ff.JoinWorldFormed(envelope(SALT.hex()), envelope(SALT.hex())),
                ff.MuxRecord(ff.MuxKind.DATA, 0, codec.encode(ff.Heartbeat(0, 1))),
            ]  # fmt: skip
            assert not shows_salt(*map(repr, objects), *map(str, objects), *(f"{[value]}" for value in objects))
    assert envelope(SALT.hex())[:40] not in repr(objects)


@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy, vars, json.dumps])
def test_a_codec_gives_it_to_nobody(call):
    assert not shows_salt(failure(call, ff.Codec(SALT)))


@pytest.mark.parametrize(
    "salt",
    [SALT + b"x", SALT.hex() + "0", SALT.hex()[:-1] + "g", SALT.hex(":"), list(SALT), [SALT.hex()], {SALT: 1}],
    ids=["bytes", "long", "hex", "colons", "list", "text in a list", "dict"],
)
def test_a_salt_that_cannot_be_is_not_shown(salt, capsys, tmp_path):
    assert not shows_salt(failure(ff.Codec, salt), failure(ff.LocalCluster, 1, 1, 1, 1, salt=salt))
    if not isinstance(salt, (bytes, dict)):
        assert not shows_salt(failure(Environment.read, environ(salt)))
    if isinstance(salt, str):
        (tmp_path / "salt").write_text(salt)
        for option in (["--salt", salt], ["--salt-file", str(tmp_path / "salt")]):
            with pytest.raises(SystemExit, match="2"):
                cli.main(["inspect", "-", *option])
        shown = capsys.readouterr()
        assert "hex digits" in shown.err
        assert not shows_salt(*shown)


def test_an_environment_that_cannot_be_does_not_show_it():
    good = environ()
    bad = [
        {**good, CLUSTER: good[CLUSTER][:-2]}, {**good, CLUSTER: SALT.hex()}, {**good, CLUSTER: SALT.hex() + "z"},
        {**good, HOST_NAME: "south"}, {**good, LOCAL_RANK: "7"},
    ]  # fmt: skip
    assert not shows_salt(*(failure(Environment.read, variables) for variables in bad))


def test_frames_of_another_salt_do_not_show_it():
    ours, theirs = ff.Codec(SALT), ff.Codec(bytes(16))
    frame = ff.RoundFrame([np.ones(3, np.float32)], weight=1.0)
    record = ff.MuxRecord(ff.MuxKind.DATA, 0, b"x")
    shown = []
    for codec, other in ((ours, theirs), (theirs, ours)):
        layout = ff.TensorLayout.of(frame.tensors)
        shown += [
            failure(codec.decode, other.encode(ff.Shutdown())),
            failure(codec.decode_many, other.encode_many([ff.Shutdown()])),
            failure(codec.decode_round, other.encode_round(frame)),
            failure(layout.decode_into, codec, other.encode_round(frame), [np.ones(3, np.float32)]),
            failure(codec.decode_mux, other.encode_mux(record)),
            failure(codec.check_control_hello, other.control_hello(0, 1), 1),
            failure(codec.check_control_ack, other.control_ack()),
        ]
    assert all("AuthenticationError" in text for text in shown)
    assert not shows_salt(*shown)


def test_logs_do_not_show_it(caplog):
    caplog.set_level(logging.DEBUG)
    params = [np.zeros(3, np.float32)]
    with ff.LocalCluster(2, 8, 2, 1, salt=SALT) as cluster:
        where = {"world": 2, "data": cluster.address, "control": cluster.address}
        shown = failure(Worker, params, rank=0, codec=ff.Codec(bytes(16)), host="a", **where)
        channel.ControlChannel.connect(cluster.address, ff.Codec(SALT), 0, 2, host="a").close()
        shown += failure(cluster.wait, 10)
    assert "refused a connection" in caplog.text
    assert not shows_salt(caplog.text, shown)


def test_captures_and_their_inspection_do_not_show_it(tmp_path, capsys):
    codec = ff.Codec(SALT)
    file = io.BytesIO()
    writer = CaptureWriter(file)
    for leg, frame in (
        ("rank 0 control", codec.control_hello(0, 1)), ("rank 0 control", codec.encode(ff.Batch(0, 1.0, 1.0, 1))),
        ("rank 0 data", codec.encode_round(ff.RoundFrame([np.ones(3, np.float32)]))),
    ):  # fmt: skip
        writer.write(frame, leg, Direction.UP)
    assert not shows_salt(file.getvalue())
    # Only the frames of a join connection carry it, which the table leaves out.
    for message in (ff.JoinAccept([0], SALT.hex(), 60), ff.JoinWorldFormed(envelope(SALT.hex()))):
        writer.write(codec.encode(message), "join", Direction.DOWN)
    (tmp_path / "seen.cap").write_bytes(file.getvalue())
    (tmp_path / "salt").write_text(SALT.hex())
    assert cli.main(["inspect", str(tmp_path / "seen.cap"), "--salt-file", str(tmp_path / "salt")]) == 0
    shown = capsys.readouterr()
    assert "Join" in shown.out
    assert not shows_salt(*shown)
    assert envelope(SALT.hex())[:40] not in shown.out


@pytest.mark.parametrize("pre_shared", [True, False])
def test_the_join_agent_does_not_show_it(tmp_path, pre_shared):
    """Nor does its command line; its ranks have it in their environment."""
    (tmp_path / "salt").write_text(SALT.hex())
    args = ["--host", "north", "--devices", "0,1", *(["--salt-file", str(tmp_path / "salt")] if pre_shared else [])]
    code = "from flodl_fast.environment import Environment; print(Environment.read())"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT)
        address = "{}:{}".format(*listener.getsockname())
        command = [*AGENT, address, *args, "--", sys.executable, "-c", code]
        agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        codec = ff.Codec(SALT if pre_shared else bytes(16))
        with channel.accept(listener.accept()[0], codec, 2) as window:
            assert isinstance(window.recv(WAIT), ff.JoinHello)
            window.send(ff.JoinAccept([0, 1], None if pre_shared else SALT.hex(), 60))
            window.rekey(ff.Codec(SALT))
            window.send(ff.JoinWorldFormed(envelope(SALT.hex())))
            shown = agent.communicate(timeout=WAIT)
            with suppress(ff.ChannelError):
                while True:
                    window.recv(0.1)
    assert agent.returncode == 0
    assert b"[rank 1] Environment(rank=1, world=2" in shown[0]
    assert not shows_salt(*shown, *command)


# --------------------------------------------------------------------------------------------------- public peers

PUBLIC = ["8.8.8.8", "100.63.255.255", "100.128.0.0", "172.32.0.1", "2001:4860:4860::8888", "::ffff:8.8.8.8"]
PRIVATE = [
    "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.122.1", "169.254.10.10",
    "100.64.0.1", "100.127.255.254", "::1", "fe80::1", "fe80::1%eth0", "fd00::1", "fc00::1", "::ffff:192.168.1.1",
]  # fmt: skip


@pytest.mark.parametrize(("host", "private"), [(h, False) for h in PUBLIC] + [(h, True) for h in PRIVATE])
def test_what_is_private(host, private):
    """As the crate has it."""
    assert net.is_private(host) is private


class Elsewhere(socket.socket):
    """A socket whose peer seems to be a host far away."""

    host = "203.0.113.5"

    def getpeername(self):
        return self.host, 7000


def elsewhere(host: str) -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    sock = Elsewhere(fileno=near.detach())
    sock.host = host
    return sock, far


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(net, "_warned", set())


@pytest.fixture(params=["blocking", "asyncio"])
def flavour(request, fresh):
    made = Flavour(request.param)
    yield made
    made.close()


def dial(flavour, host):
    near, far = elsewhere(host)
    hello, ack = greeting("control", "relay")
    with far:
        far.sendall(ack)
        flavour.ControlChannel.connect(near, CODEC, 1, WORLD).close()
        assert exactly(far, len(hello)) == hello


def serve(flavour, host):
    near, far = elsewhere(host)
    hello, ack = greeting("data", "direct")
    with far:
        far.sendall(hello)
        flavour.accept(near, CODEC, WORLD).close()
        assert exactly(far, len(ack)) == ack


@pytest.mark.parametrize("meet", [dial, serve])
def test_a_public_peer_is_warned_of_once(flavour, meet):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for host in ("203.0.113.5", "203.0.113.5", "10.0.0.1", "2001:db8::1", "203.0.113.5"):
            meet(flavour, host)
    texts = [str(warning.message) for warning in told]
    assert [text.split(" is ")[0] for text in texts] == ["flodl peer 203.0.113.5", "flodl peer 2001:db8::1"]
    assert all("not encrypted" in text for text in texts)


def test_where_warnings_are_errors_the_socket_is_closed(flavour):
    near, far = elsewhere("203.0.113.5")
    with far, pytest.raises(UserWarning, match="not encrypted"):
        flavour.DataChannel.connect(near, CODEC, 1, WORLD, host=HOST)
    assert near.fileno() == -1

"""What the published crate of each revision makes of the others' bytes: what docs/revisions.md says of this reader."""

from __future__ import annotations

import socket

import pytest
from channel_support import WAIT, exactly
from conftest import SALT
from revision_table import PAIRS, ROWS, WORLD
from worker_support import Stack

import flodl_fast as ff

JUDGED = [
    pytest.param(row, sender, reader, id=f"{row.name}-{sender}-{reader}")
    for row in ROWS
    for sender, reader in PAIRS
    if row.kind in ("frame", "mux", "round") and not row.lenient and row.outcome(sender, reader) != "cannot be sent"
]


@pytest.mark.parametrize(("row", "sender", "reader"), JUDGED)
def test_the_crate_agrees(peer, row, sender, reader):
    outcome = row.outcome(sender, reader)
    data = row.send(ff.Codec(SALT, sender)).hex()
    if row.kind == "frame":
        answer = peer("decode", reader).ask({"salt": SALT.hex(), "frame": data})
    elif row.kind == "mux":
        answer = peer("wire", reader).ask({"op": "mux_decode", "salt": SALT.hex(), "bytes": data})
    else:  # The crate's reader takes any tensor, its reduction does not.
        answer = peer("round", reader).ask({"op": "decode", "salt": SALT.hex(), "bytes": data})
        answer = peer("round", reader).ask({"op": "sum", "frames": [answer["frame"]]})
    assert ("error" in answer) == outcome.endswith("Error"), (outcome, answer)
    lost = outcome.partition("read without ")[2].replace("`", "").split(", ")
    assert not any(name in str(answer) for name in lost if name)


@pytest.mark.parametrize("what", ["data", "control"])
@pytest.mark.parametrize(("sender", "reader"), [("0.7", "0.6"), ("0.6", "0.7"), ("0.8", "0.6"), ("0.8", "0.7")])
def test_a_relay_of_the_crate_agrees(peer_build, what, sender, reader):
    """One of 0.8 is left out: it waits for more than the others' hello has, and says nothing."""
    (row,) = [row for row in ROWS if row.name == f"{what} hello"]
    (ack,) = [row for row in ROWS if row.name == f"{what} ack"]
    with Stack(peer_build(reader), "--hosts", "0;1;2", revision=reader) as stack:
        assert stack.world == WORLD
        with socket.create_connection(stack.relays[what, 1], WAIT) as sock:
            sock.sendall(row.send(ff.Codec(SALT, sender)))
            answer = exactly(sock, len(ack.send(ff.Codec(SALT, reader))))
    assert bool(answer) == (row.outcome(sender, reader) == "read")
    if answer:
        ack.read(ff.Codec(SALT, sender), answer)

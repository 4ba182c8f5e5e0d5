"""What a reader of one revision makes of what another one sends: the table of docs/revisions.md.

    python tests/revision_table.py

prints it. Every pair of revisions, once for each message, handshake and round frame that a revision changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import ml_dtypes
import numpy as np
from conftest import REVISIONS, SALT

import flodl_fast as ff
from flodl_fast.rounds import Elided

PAIRS = [(sender, reader) for sender in REVISIONS for reader in REVISIONS if sender != reader]
RANK, WORLD = 1, 3
SIGNATURE = b"\7" * 32


@dataclass
class Row:
    """One thing that is sent.

    Attributes:
        name: what the page calls it.
        send: its bytes, by the sender's Codec.
        read: what a reader's Codec makes of them.
        lenient: whether the reader is.
        kind: how the published crate is asked: "frame", "mux", "round" or "greeting".
    """

    name: str
    send: Callable[[ff.Codec], bytes]
    read: Callable[[ff.Codec, bytes], Any]
    lenient: bool = False
    kind: str = "frame"

    def outcome(self, sender: str, reader: str) -> str:
        """What comes of it, in the words of the page."""
        source = ff.Codec(SALT, sender)
        try:
            data = self.send(source)
        except ff.EncodeError:
            return "cannot be sent"
        try:
            got = self.read(ff.Codec(SALT, reader, lenient=self.lenient), data)
        except ff.FlodlError as error:
            return type(error).__name__
        lost = list(differences(self.read(source, data), got))
        return f"read without {', '.join(lost)}" if lost else "read"


def differences(sent: Any, got: Any) -> Iterator[str]:
    """The fields that have not come as they were sent."""
    assert type(sent) is type(got)
    if is_dataclass(sent):
        for field in fields(sent):
            a, b = getattr(sent, field.name), getattr(got, field.name)
            if a != b:
                inner = list(differences(a, b)) if is_dataclass(a) else []
                yield from inner or [f"`{field.name}`"]
    else:
        assert sent == got


def control_hello(codec: ff.Codec) -> bytes:
    return codec.control_hello(RANK, WORLD, SIGNATURE if since(codec, "0.8") else None)


def relay_hello(codec: ff.Codec, signatures: list[bytes]) -> bytes:
    hello = ff.RelayHello("north", [RANK], signatures if since(codec, "0.8") else [])
    return codec.encode_mux(ff.MuxRecord(ff.MuxKind.CONTROL, payload=hello))


def epoch_aggregated(codec: ff.Codec) -> bytes:
    later = ([0.5, None], [32, 0]) if since(codec, "0.7") else ([], [])
    metrics = ff.EpochMetrics(4, {"loss": 0.5}, [{}, {}], 0.5, 12.5, per_rank_throughput=[2.0, 0.0])
    metrics.per_rank_loss, metrics.per_rank_samples = later
    return codec.encode(ff.EpochAggregated(metrics))


def join_hello(codec: ff.Codec) -> bytes:
    later = ("a run", (2, 21, 5), SIGNATURE) if since(codec, "0.8") else ()
    return codec.encode(ff.JoinHello("north", b"\0", ["none"], "none", bytes(32), *later))


def resource_sample(codec: ff.Codec) -> bytes:
    return codec.encode(ff.TimingResourceSample(RANK, ff.ResourceSample(cpu_percent=12.5)))


def round_frame(tensor: Any) -> Callable[[ff.Codec], bytes]:
    return lambda codec: codec.encode_round(ff.RoundFrame([tensor], ff.RoundKind.CONTROL))


def read_round(codec: ff.Codec, data: bytes) -> Any:
    (tensor,) = codec.decode_round(data).tensors
    return str(tensor.dtype), tensor.tolist()


def since(codec: ff.Codec, revision: str) -> bool:
    return codec.revision.value >= revision


decode, decode_mux = ff.Codec.decode, ff.Codec.decode_mux
ROWS = [
    Row("data hello", lambda c: c.data_hello(RANK, WORLD), lambda c, d: c.check_data_hello(d, WORLD), kind="greeting"),
    Row("data ack", ff.Codec.data_ack, ff.Codec.check_data_ack, kind="ack"),
    Row("control hello", control_hello, lambda c, d: c.check_control_hello(d, WORLD), kind="greeting"),
    Row("control ack", ff.Codec.control_ack, ff.Codec.check_control_ack, kind="ack"),
    Row("relay's hello, data leg", lambda c: relay_hello(c, []), decode_mux, kind="mux"),
    Row("relay's hello, control leg", lambda c: relay_hello(c, [SIGNATURE]), decode_mux, kind="mux"),
    Row("message that no revision changed", lambda c: c.encode(ff.Heartbeat(RANK, 7)), decode),
    Row("EpochAggregated", epoch_aggregated, decode),
    Row("EpochAggregated, lenient reader", epoch_aggregated, decode, lenient=True),
    Row("TimingResourceSample", resource_sample, decode),
    Row("TimingResourceSample, lenient reader", resource_sample, decode, lenient=True),
    Row("JoinHello", join_hello, decode),
    Row("round in float32", round_frame(np.array([1.0, 0.0], np.float32)), read_round, kind="round"),
    Row("round in bfloat16", round_frame(np.array([1.0, 0.0], ml_dtypes.bfloat16)), read_round, kind="round"),
    Row("round with an elided tensor", round_frame(Elided((2,))), read_round, kind="round"),
]


def table() -> str:
    """The table, as Markdown."""
    lines = [["sent", *(f"{sender} → {reader}" for sender, reader in PAIRS)], ["---"] * (1 + len(PAIRS))]
    lines += [[row.name, *(row.outcome(*pair) for pair in PAIRS)] for row in ROWS]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(table(), end="")

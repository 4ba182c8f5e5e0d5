"""What the fuzzer calls: each target takes any bytes and raises only where the package broke a promise.

The promise: a value, or an error of the kind that is documented; what is accepted can be written again and reads the
same; a stream means the same in any pieces. The first byte of an input picks options, so that the fuzzer can too.
``harness.py`` runs a target under libFuzzer, ``test_targets.py`` over the seeds and what was found before.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

from conftest import SALT, golden
from packet_support import Talk, pcap, pcapng
from support import MESSAGE_FILES, NUMBER_OF

import flodl_fast as ff
from flodl_fast import capture, cli, protocol
from flodl_fast.inspection import FRAMINGS
from flodl_fast.messages import PAYLOADS

CORPUS = Path(__file__).parent / "corpus"
KINDS = tuple(PAYLOADS)
STREAMS = ("control", "round", "mux")
REVISIONS = [revision.value for revision in protocol.VERSIONS]
# Low limits, so that inputs of a size that a fuzzer tries can be above them.
CODECS = [ff.Codec(SALT, name, max_payload=1 << 16, max_tensors=64, frame_ceiling=1 << 16) for name in REVISIONS]

Target = Callable[[bytes], None]


class Options:
    """Choices made by the first byte of an input: two bits of it are the revision, for as many as may come."""

    def __init__(self, data: bytes) -> None:
        self._left = data[0] if data else 0
        self.rest = data[1:]
        self.codec = CODECS[self.pick(4) % len(CODECS)]

    def pick(self, n: int) -> int:
        """A number below n."""
        self._left, found = divmod(self._left, n)
        return found

    def trailing(self) -> str:
        return "error" if self.pick(2) else "ignore"


def outcome(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call gives, or the class of the FlodlError that it raises. Any other error is a fault and passes."""
    try:
        return call(*args, **options)
    except ff.FlodlError as error:
        check(str(error) != "", "an error without a text")
        return type(error)


def is_refused(result: Any) -> bool:
    return isinstance(result, type) and issubclass(result, ff.FlodlError)


def check(good: bool, what: Any) -> None:
    """An assertion that ``python -O`` keeps."""
    if not good:
        raise AssertionError(what)


# ------------------------------------------------------------------------------------------------- frames that are true


def signed_control(codec: ff.Codec, body: bytes) -> bytes:
    """The control frame of a kind, one byte, and its payload."""
    signed = (body[0] if body else 0).to_bytes(4, "little") + max(0, len(body) - 1).to_bytes(4, "little") + body[1:]
    version = protocol.VERSIONS[codec.revision].control
    return protocol.MAGIC_CONTROL_FRAME.to_bytes(4, "little") + version.to_bytes(4, "little") + codec.mac(
        signed) + signed


def signed_round(codec: ff.Codec, body: bytes) -> bytes:
    """The round frame of all that comes after its magic."""
    signed = protocol.MAGIC_ROUND.to_bytes(4, "little") + body
    return signed + codec.mac(signed)


def signed_record(codec: ff.Codec, body: bytes) -> bytes:
    """The mux record of a kind, one byte, a rank, four, and its payload."""
    head, payload = body[:5].ljust(5, b"\0"), body[5:]
    header = protocol.MAGIC_MUX.to_bytes(4, "little") + protocol.VERSIONS[codec.revision].mux.to_bytes(4, "little")
    header += head + len(payload).to_bytes(4, "little")
    return header + codec.mac(header + payload) + payload


SIGN = {"control": signed_control, "round": signed_round, "mux": signed_record}
ENCODE = {"control": ff.Codec.encode, "round": ff.Codec.encode_round, "mux": ff.Codec.encode_mux}
DECODE = {"control": ff.Codec.decode, "round": ff.Codec.decode_round, "mux": ff.Codec.decode_mux}


# -------------------------------------------------------------------------------------------------------------- targets


def _control(options: Options, frame: bytes) -> None:
    codec, trailing = options.codec, options.trailing()
    message = outcome(codec.decode, frame, trailing=trailing)
    many = outcome(codec.decode_many, frame, trailing=trailing)
    columns = outcome(codec.timing_columns, frame, trailing=trailing)
    size = outcome(codec.measure_frame, frame)
    if is_refused(message):
        alike = message is ff.TrailingDataError or is_refused(many) or not many[0]
        check(alike, "decode_many takes what decode refuses")
        return
    again = codec.encode(message)
    check(codec.encode(codec.decode(again, trailing="error")) == again, "written and read it differs")
    check(len(again) <= size, "written again it is longer")
    if size == len(frame):
        check(not is_refused(many) and len(many[0]) == 1 and many[1] == size, "decode_many refuses what decode takes")
        timing = [type(message).__name__] if frame[16] == ff.MsgKind.TIMING else []
        check(not is_refused(columns) and list(columns) == timing, "decode and timing_columns disagree")
    else:
        check(trailing == "ignore", "a value from a frame with bytes after it")


def control(data: bytes) -> None:
    """Any bytes as a control frame."""
    options = Options(data)
    _control(options, options.rest)


def control_signed(data: bytes) -> None:
    """Any payload under a MAC that holds."""
    options = Options(data)
    _control(options, signed_control(options.codec, options.rest))


def _round(options: Options, raw: bytes) -> None:
    codec, trailing = options.codec, options.trailing()
    copied = outcome(codec.decode_round, raw, trailing=trailing)
    viewed = outcome(codec.decode_round, raw, copy=False, trailing=trailing)
    layout = outcome(ff.TensorLayout.from_frame, codec, raw, trailing=trailing)
    opened = copied
    if len(raw) <= codec.frame_ceiling:
        record = codec.seal_record(ff.MuxKind.BROADCAST, 0, raw)
        opened = outcome(codec.decode_round, record, record=ff.MuxKind.BROADCAST, trailing=trailing)
    if is_refused(copied):
        check(viewed is copied, "views are given of what is refused")
        check(opened is copied, "a record opens what is refused")
        check(layout is copied or copied is ff.TensorError, "a layout of what is refused")
        return
    check(not is_refused(layout), "no layout of what is decoded")
    kind, weight = layout.decode_into(codec, raw, [tensor.copy() for tensor in copied.tensors])
    check((kind, weight) == (copied.kind, copied.weight), "decode_into disagrees with decode_round")
    again = codec.encode_round(copied)
    check(codec.encode_round(viewed) == again, "views differ from copies")
    check(codec.encode_round(opened) == again, "the record's frame is another")
    check(codec.encode_round(codec.decode_round(again, trailing="error")) == again, "written and read it differs")
    if len(again) == layout.frame_size:  # elided tensors come back as zeros
        check(raw.startswith(again), "written again it differs")
    total = ff.reduce_frames([copied, viewed])
    check([tensor.shape for tensor in total.tensors] == [tensor.shape for tensor in copied.tensors], "shapes change")


def round_(data: bytes) -> None:
    """Any bytes as a round frame."""
    options = Options(data)
    _round(options, options.rest)


def round_signed(data: bytes) -> None:
    """Any metadata and data under a MAC that holds."""
    options = Options(data)
    _round(options, signed_round(options.codec, options.rest))


def mux(data: bytes) -> None:
    """Any bytes as a mux record, or any payload of one that is signed."""
    options = Options(data)
    codec, trailing = options.codec, options.trailing()
    raw = signed_record(codec, options.rest) if options.pick(2) else options.rest
    record = outcome(codec.decode_mux, raw, trailing=trailing)
    if is_refused(record):
        return
    if record.kind is not ff.MuxKind.DATA:
        record.rank = 0  # read as it came, and not written
    again = codec.encode_mux(record)
    check(codec.encode_mux(codec.decode_mux(again, trailing="error")) == again, "written and read it differs")


def reader(data: bytes) -> None:
    """A stream in pieces: the same frames, and the same end, as in one."""
    options = Options(data)
    kind = STREAMS[options.pick(3)]
    prefixed = bool(options.pick(2)) and kind != "mux"
    trailing = options.trailing()
    pieces, stream = int.from_bytes(options.rest[:1], "little"), options.rest[1:]
    if options.pick(2):
        stream = _stream(options.codec, kind, prefixed, stream)

    def read(stream: Iterator[bytes]) -> tuple[list[bytes], Any]:
        found = ff.FrameReader(options.codec, kind, prefixed=prefixed, trailing=trailing)
        items: list[bytes] = []

        def run() -> None:
            for piece in stream:
                found.feed(piece)
                for item in found:
                    if kind == "mux" and item.kind is not ff.MuxKind.DATA:
                        item.rank = 0
                    items.append(ENCODE[kind](options.codec, item))
            found.eof()

        end = outcome(run)
        if is_refused(end):
            check(outcome(found.next) is end, "an error does not stick")
        return items, end

    step = max(1 + pieces, len(stream) // 64)  # byte by byte where that is not long
    whole = read(iter([stream]))
    check(read(stream[at:at + step] for at in range(0, len(stream), step)) == whole, "pieces change what is read")


def _stream(codec: ff.Codec, kind: str, prefixed: bool, data: bytes) -> bytes:
    """Signed frames of the pieces of these bytes, each after its length in two bytes."""
    stream, at = b"", 0
    while at < len(data):
        size = int.from_bytes(data[at:at + 2], "little")
        frame = SIGN[kind](codec, data[at + 2:at + 2 + size])
        stream += (len(frame).to_bytes(4, "little") if prefixed else b"") + frame
        at += 2 + size
    return stream


def from_json(data: bytes) -> None:
    """Any JSON as a message."""
    options = Options(data)
    kind = KINDS[options.pick(len(KINDS))]
    try:
        value = json.loads(options.rest)
    except (ValueError, RecursionError):
        return
    revision = options.codec.revision
    message = outcome(ff.from_json, kind, value, revision=revision)
    if is_refused(message):
        return
    written = ff.to_json(message, revision=revision)
    json.dumps(written, allow_nan=False)
    payload = outcome(options.codec.encode_payload, message)
    if is_refused(payload):  # a lone surrogate has a place in JSON and none on the wire
        check(payload is ff.EncodeError, payload)
        return
    back = options.codec.decode_payload(kind, payload, trailing="error")
    check(options.codec.encode_payload(back) == payload, "written and read it differs")
    check(ff.to_json(back, revision=revision) == written, "its JSON differs")


def _command(*argv: str, stdin: bytes = b"") -> tuple[int, str]:
    """A command's exit code and what it prints."""
    printed = io.StringIO()
    given = mock.Mock(buffer=io.BytesIO(stdin))
    with mock.patch("sys.stdin", given), contextlib.redirect_stdout(printed):
        return cli.main(argv), printed.getvalue()


def decode_command(data: bytes) -> None:
    """Any lines on the standard input of ``decode`` and of ``encode``: an answer in JSON for each."""
    options = Options(data)
    command = ("decode", "encode")[options.pick(2)]
    code, printed = _command(command, "--revision", options.codec.revision.value, stdin=options.rest)
    lines = [line for line in io.BytesIO(options.rest) if line.strip()]
    answers = printed.split("\n")[:-1]
    check((code, len(answers)) == (0, len(lines)), f"exit code {code}, {len(answers)} answers to {len(lines)} lines")
    for answer in answers:
        check(isinstance(json.loads(answer), dict), answer)


def inspect_command(data: bytes) -> None:
    """Any file given to ``inspect``: lines of JSON, or text that cannot steer a terminal."""
    options = Options(data)
    framing = FRAMINGS[options.pick(len(FRAMINGS))]
    salt = ["--salt", SALT.hex()] if options.pick(2) else []
    shown = [("--json",), (), ("--summary",), ("--summary", "--json")][options.pick(4)]
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(options.rest)
        file.flush()
        code, printed = _command("inspect", file.name, "--framing", framing, *salt, *shown)
    check(code in (0, 1), f"exit code {code}")
    if "--json" in shown:
        for line in printed.split("\n")[:-1]:
            check(isinstance(json.loads(line), dict), line)
    else:
        odd = [char for char in printed if not (char.isprintable() or char == "\n")]
        check(not odd, f"characters {odd} reach the terminal")


TARGETS: dict[str, Target] = {
    "control": control,
    "control-signed": control_signed,
    "round": round_,
    "round-signed": round_signed,
    "mux": mux,
    "reader": reader,
    "from-json": from_json,
    "decode-command": decode_command,
    "inspect-command": inspect_command,
}


# ---------------------------------------------------------------------------------------------------------------- seeds


def seeds(name: str) -> Iterator[bytes]:
    """Inputs of a target to start from: the golden vectors, signed anew where their salt is another."""
    for number, revision in enumerate(REVISIONS):
        for option, rest in _SEEDS[name](CODECS[number], revision):
            yield bytes([number + 4 * option]) + rest


Seeds = Iterator[tuple[int, bytes]]


def bodies_of(kind: str, revision: str) -> Iterator[bytes]:
    """What SIGN makes the golden frames of a kind of."""
    if kind == "control":
        for name in MESSAGE_FILES:
            for case in golden(name, revision):
                yield bytes([NUMBER_OF[case["kind"]]]) + bytes.fromhex(case["payload"])
        for case in golden("mutated", revision):
            frame = bytes.fromhex(case["frame"])
            yield frame[16:17] + frame[protocol.CONTROL_HEADER:]
    elif kind == "round":
        for case in golden("round", revision):
            yield bytes.fromhex(case["bytes"])[4:-protocol.MAC_SIZE]
    else:
        for case in golden("wire", revision):
            if case["op"] == "mux":
                record = bytes.fromhex(case["bytes"])
                yield record[8:13] + record[protocol.MUX_HEADER:]


def _bare(kind: str) -> Callable[[ff.Codec, str], Seeds]:
    return lambda codec, revision: ((0, body) for body in bodies_of(kind, revision))


def _signed(kind: str) -> Callable[[ff.Codec, str], Seeds]:
    return lambda codec, revision: ((0, SIGN[kind](codec, body)) for body in bodies_of(kind, revision))


def _mux_seeds(codec: ff.Codec, revision: str) -> Seeds:
    yield from _signed("mux")(codec, revision)
    for body in bodies_of("mux", revision):
        yield 2, body


def _streams(codec: ff.Codec, revision: str) -> Iterator[tuple[int, bool, list[bytes]]]:
    for number, kind in enumerate(STREAMS):
        bodies = list(bodies_of(kind, revision))
        for at in range(0, len(bodies), 7):
            for prefixed in (False, True)[:1 if kind == "mux" else 2]:
                yield number, prefixed, bodies[at:at + 7]


def _reader_seeds(codec: ff.Codec, revision: str) -> Seeds:
    for number, prefixed, bodies in _streams(codec, revision):
        bodies = [body for body in bodies if len(body) < 1 << 16]
        built = b"".join(len(body).to_bytes(2, "little") + body for body in bodies)
        yield number + 3 * prefixed, b"\x10" + _stream(codec, STREAMS[number], prefixed, built)
        yield number + 3 * prefixed + 12, b"\x10" + built


def _json_seeds(codec: ff.Codec, revision: str) -> Seeds:
    for name in MESSAGE_FILES:
        for case in golden(name, revision):
            yield KINDS.index(case["kind"]), json.dumps(case["msg"]).encode()
    for case in golden("wire", revision):
        if "msg" in case:
            yield KINDS.index("Relay"), json.dumps(case["msg"]).encode()


def _line_seeds(codec: ff.Codec, revision: str) -> Seeds:
    cases = [case for name in (*MESSAGE_FILES, "mutated") for case in golden(name, revision)]
    for at in range(0, len(cases), 20):
        some = cases[at:at + 20]
        yield 0, b"".join(json.dumps({"salt": case["salt"], "frame": case["frame"]}).encode() + b"\n" for case in some)
        yield 1, b"".join(
            json.dumps({"salt": case["salt"], "kind": case["kind"], "msg": case["msg"]}).encode() + b"\n"
            for case in some if "msg" in case
        )


def _file_seeds(codec: ff.Codec, revision: str) -> Seeds:
    for at, (number, prefixed, bodies) in enumerate(islice(_streams(codec, revision), 0, None, 7)):
        kind = STREAMS[number]
        frames = [SIGN[kind](codec, body) for body in bodies]
        pieces = [(len(frame).to_bytes(4, "little") if prefixed else b"") + frame for frame in frames]
        recorded = io.BytesIO()
        writer = capture.CaptureWriter(recorded, revision=revision)
        for frame in frames:
            writer.write(frame, "rank 0", capture.Direction.UP, time_ns=0)
        talk = Talk()
        packets = [*talk.open(), *(talk.up(piece[:1400]) for piece in pieces)]
        ways = len(FRAMINGS) * (at % 8)  # with salt and without, shown in every way
        yield ways + FRAMINGS.index("prefixed-" * prefixed + kind), b"".join(pieces)
        for data in (b"".join(pieces), recorded.getvalue(), pcap(packets), pcapng(packets)):
            yield ways, data


_SEEDS: dict[str, Callable[[ff.Codec, str], Seeds]] = {
    "control": _signed("control"),
    "control-signed": _bare("control"),
    "round": _signed("round"),
    "round-signed": _bare("round"),
    "mux": _mux_seeds,
    "reader": _reader_seeds,
    "from-json": _json_seeds,
    "decode-command": _line_seeds,
    "inspect-command": _file_seeds,
}

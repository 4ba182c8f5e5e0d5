"""The command line: ``python -m flodl_fast``, or ``flodl-fast`` where it is installed (docs/cli.md)."""

from __future__ import annotations

import argparse
import binascii
import importlib
import io
import json
import math
import os
import platform
import reprlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__
from ._codec import family_name, sha256_kernel
from ._round import fold_kernel
from .errors import DecodeError
from .frames import Codec
from .inspection import FRAMINGS, Entry, Tensor, inspect_frames
from .jsonform import from_json, to_json
from .messages import Reserved
from .protocol import CONTROL_HEADER, VERSIONS, parse_salt

__all__ = ["main"]

REVISIONS = [revision.value for revision in VERSIONS]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 fine, 1 ``inspect`` found faults, 130 interrupted.

    Raises:
        SystemExit: code 2 for a wrong use, 0 after ``--help`` and ``--version``.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(argv).parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to stop
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered must not meet the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    about = "Read, write and check the traffic of flodl clusters."
    parser = argparse.ArgumentParser(prog="flodl-fast", description=about)
    parser.add_argument("--version", action="version", version=f"flodl_fast {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        return sub

    encode = command("encode", _encode, "turn JSON lines on standard input, each a message, into frames")
    decode = command("decode", _decode, "turn JSON lines on standard input, each a frame, into messages")
    inspect = command("inspect", _inspect, "show what is in a capture, a recorded stream or a single frame")
    inspect.add_argument("file", metavar="FILE", help="the file, or - for standard input")
    salt = inspect.add_mutually_exclusive_group()
    salt.add_argument("--salt", type=_salt, metavar="HEX", help="check MACs with this session salt, 32 hex digits")
    salt.add_argument("--salt-file", type=salt_file, dest="salt", metavar="FILE", help="the same, from a file")
    inspect.add_argument("--framing", choices=FRAMINGS, default="auto", help="how the bytes are framed (default: auto)")
    inspect.add_argument("--limit", type=_count, metavar="N", help="stop after N frames")
    inspect.add_argument("--json", action="store_true", help="print one JSON object a line, for programs")
    info = command("info", _info, "name the version, the revisions spoken and the kernels in use")
    info.add_argument("--json", action="store_true", help="print a JSON object, for programs")
    for sub, default, of in ((encode, "0.6", ""), (decode, "0.6", ""), (inspect, None, "the capture's own, else ")):
        sub.add_argument("--revision", choices=REVISIONS, default=default, help=f"the wire's (default: {of}0.6)")

    # These alone need what they import.
    for name, help in (
        ("demo", "train three ranks on real data, over sockets"),
        ("join", "enter a cluster and start a command for each rank of this host"),
    ):
        sub = commands.add_parser(name, help=help)
        if argv[:1] == [name]:
            module = importlib.import_module(f".{name}", __package__)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def _salt(text: str) -> bytes:
    try:
        return parse_salt(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # argparse's own message would show the salt


def salt_file(name: str) -> bytes:
    """The salt that a file holds, as an argument's type; its errors never show the salt."""
    try:
        return _salt(Path(name).read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read a salt from {name}: {error}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


# --------------------------------------------------------------------------------------------------- encode and decode


def _encode(args: argparse.Namespace) -> int:
    def answer(case: dict[str, Any]) -> dict[str, Any]:
        codec = _codec(_text(case, "salt"), args.revision)
        frame = codec.encode(from_json(_text(case, "kind"), case.get("msg"), revision=args.revision))
        return {"payload": frame[CONTROL_HEADER:].hex(), "frame": frame.hex()}

    return _answer_lines(answer)


def _decode(args: argparse.Namespace) -> int:
    def answer(case: dict[str, Any]) -> dict[str, Any]:
        codec = _codec(_text(case, "salt"), args.revision)
        frame = _bytes(case, "frame")
        if len(frame) < CONTROL_HEADER:
            return {"eof": True}
        message = codec.decode(frame)
        kind = int.from_bytes(frame[CONTROL_HEADER - 8 : CONTROL_HEADER - 4], "little")
        left = len(frame) - (codec.measure_frame(frame) or 0)
        if isinstance(message, Reserved):
            return {"kind": family_name(kind), "payload": message.payload.hex(), "left": left}
        return {"kind": family_name(kind), "msg": to_json(message, revision=args.revision), "left": left}

    return _answer_lines(answer)


@lru_cache(maxsize=64)
def _codec(salt: str, revision: str) -> Codec:
    return Codec(salt, revision)


def _text(case: dict[str, Any], name: str) -> str:
    value = case.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text")
    return value


def _bytes(case: dict[str, Any], name: str) -> bytes:
    try:
        return binascii.unhexlify(_text(case, name))
    except binascii.Error as error:
        raise ValueError(f"{name} is not hex: {error}") from None


def _answer_lines(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Answer each line of standard input at once, so that a program can ask one question after the other."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        if not line.strip():
            continue
        try:
            case = _parse(line)
        except (ValueError, RecursionError) as error:
            found = {"error": f"line {number} is not a JSON object: {error}"}
        else:
            try:
                found = answer(case)
            except (ValueError, TypeError) as error:
                found = {"error": str(error)}
        print(_to_text(found), flush=True)
    return 0


def _parse(line: bytes) -> dict[str, Any]:
    """The JSON object on a line."""
    case = _PARSER.decode(line.decode())
    if not isinstance(case, dict):
        raise ValueError(f"expected an object, got {type(case).__name__}")
    return case


# Numbers as serde_json takes them, not as Python does: no NaN, nothing beyond a double, -0 a float.


def _integer(text: str) -> int | float:
    value = int(text)
    return value if -(2**63) <= value < 2**64 and text != "-0" else _float(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON, or beyond a double")
    return value


_PARSER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_float)
_to_text = json.JSONEncoder(allow_nan=False).encode


# ------------------------------------------------------------------------------------------------------------- inspect


def _inspect(args: argparse.Namespace) -> int:
    piped = args.file == "-"
    try:
        file = open(sys.stdin.fileno() if piped else args.file, "rb", closefd=not piped)  # noqa: SIM115
    except OSError as error:
        print(f"flodl-fast inspect: error: {error}", file=sys.stderr)
        return 2
    view = _JsonLines() if args.json else _Table()
    code, count = 0, 0
    with file:
        entries = inspect_frames(file, salt=args.salt, framing=args.framing, revision=args.revision)
        try:
            for entry in islice(entries, args.limit):
                view.show(count, entry)
                count += 1
                if not entry.good:
                    code = 1
        except DecodeError as error:
            view.fail(count, error)
            code = 1
    view.end(count == args.limit)
    return code


class _JsonLines:
    """An object for each frame, one for what ended the reading early."""

    def show(self, index: int, entry: Entry) -> None:
        print(_to_text({"index": index, **entry.to_json()}))

    def fail(self, index: int, error: DecodeError) -> None:
        print(_to_text({"index": index, "offset": error.offset, "error": str(error)}))

    def end(self, limited: bool) -> None:
        pass


class _Brief(reprlib.Repr):
    """Values as short text; what could steer a terminal comes out escaped."""

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.6g}"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return f"<{len(value)} bytes>"


_brief = _Brief().repr

# Title and width; a negative one is to the left. Frames of a capture have three more columns.
_COLUMNS = (
    ("#", 6), ("offset", 10), ("time s", 10), ("leg", -14), ("way", -4), ("frame", -28), ("rank", 4), ("epoch", 5),
    ("step", 7), ("bytes", 9), ("payload", 9), ("MAC", -11), ("", 0),
)
_CAPTURE_COLUMNS = range(2, 5)
_FRAME_COLUMN = 5
_TENSORS_SHOWN = 4
_SECRETS = ("salt_hex", "envelope_hex", "relay_spec_hex")  # of Join messages; each holds the session's salt


class _Table:
    """A line for each frame as it is read, more where it carries tensors or another frame, and the sums at the end."""

    def __init__(self) -> None:
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._columns: list[int] = []
        self._start_ns = 0
        self._size = 0
        self._labels: Counter[str] = Counter()
        self._macs: Counter[str] = Counter()

    def show(self, index: int, entry: Entry) -> None:
        if not self._columns:
            captured = entry.time_ns is not None
            self._columns = [i for i in range(len(_COLUMNS)) if captured or i not in _CAPTURE_COLUMNS]
            self._start_ns = entry.time_ns or 0
            self._print([title for title, _ in _COLUMNS])
        self._size += entry.size
        self._labels[_label(entry)] += 1
        self._lines(str(index), entry, "")

    def fail(self, index: int, error: DecodeError) -> None:
        print(f"ERROR at byte {error.offset}, after {_frames(index)}: {error}")

    def end(self, limited: bool) -> None:
        total = sum(self._labels.values())
        if limited:
            print(f"stopped after {_frames(total)} (--limit)")
        counts = ", ".join(f"{n} {label}" for label, n in self._labels.most_common())
        print(f"{_frames(total)}, {self._size:,} bytes" + (f": {counts}" if counts else ""))
        if self._macs:
            print("MAC: " + ", ".join(f"{n} {mac}" for mac, n in self._macs.most_common()))

    def _lines(self, index: str, entry: Entry, indent: str) -> None:
        self._macs[entry.mac] += 1
        seen = ("", "", "")
        if entry.time_ns is not None and entry.direction is not None and entry.leg is not None:
            leg = entry.leg if entry.leg.isprintable() else _brief(entry.leg)
            seen = (f"{(entry.time_ns - self._start_ns) / 1e9:.6f}", leg, entry.direction.name.lower())
        numbers = (entry.rank, entry.epoch, entry.step, entry.size, entry.payload)
        self._print([
            index, str(entry.offset), *seen, indent + _label(entry),
            *("" if number is None else str(number) for number in numbers), entry.mac, _details(entry),
        ])
        below = []
        if entry.tensors is not None:
            below.append(_tensors(entry.tensors))
        below += [f"note: {note}" for note in entry.notes]
        if entry.fault is not None:
            below.append(f"FAULT: {entry.fault}")
        margin = sum(abs(_COLUMNS[i][1]) + 1 for i in self._columns if i < _FRAME_COLUMN)
        for line in below:
            print(" " * margin + indent + "  " + line)
        if entry.inner is not None:
            self._lines("", entry.inner, indent + "  ")

    def _print(self, cells: Sequence[str]) -> None:
        columns = ((cells[i], _COLUMNS[i][1]) for i in self._columns)
        *row, details = (f"{cell:{'>' if width > 0 else '<'}{abs(width)}}" for cell, width in columns)
        line = " ".join(row)
        room = len(details) if self._width is None else max(0, self._width - len(line) - 1)
        if len(details) > room:
            details = details[: room - 1] + "…" if room else ""
        print(f"{line} {details}".rstrip())


def _label(entry: Entry) -> str:
    """A frame in a few words: control frames by kind and variant, others by their own name first."""
    words = () if entry.frame == "control" and entry.kind else (entry.frame,)
    return " ".join(word for word in (*words, entry.kind, entry.name) if word)


def _frames(count: int) -> str:
    return f"{count} frame" if count == 1 else f"{count} frames"


def _details(entry: Entry) -> str:
    return " ".join(f"{name}={_value(name, value)}" for name, value in entry.fields.items() if value is not None)


def _value(name: str, value: Any) -> str:
    if name in _SECRETS:
        return f"<{len(value)} digits>"
    return value.name if isinstance(value, IntEnum) else _brief(value)


def _tensors(tensors: list[Tensor]) -> str:
    shown = [f"{t.dtype}{list(t.shape)}" for t in tensors[:_TENSORS_SHOWN]]
    if len(tensors) > _TENSORS_SHOWN:
        shown.append(f"… and {len(tensors) - _TENSORS_SHOWN} more")
    total = sum(tensor.nbytes for tensor in tensors)
    return f"{len(tensors)} tensors, {total:,} bytes" + (": " if shown else "") + ", ".join(shown)


# ---------------------------------------------------------------------------------------------------------------- info


def _info(args: argparse.Namespace) -> int:
    sha256, sha256_kernels = sha256_kernel()
    fold, fold_kernels = fold_kernel()
    found = {
        "version": __version__,
        "revisions": REVISIONS,
        "sha256": {"kernel": sha256, "available": sha256_kernels},
        "fold": {"kernel": fold, "available": fold_kernels},
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if args.json:
        print(_to_text(found))
        return 0
    print(f"flodl_fast     {__version__}")
    print(f"revisions      {', '.join(REVISIONS)}")
    print(f"SHA-256        {sha256} (available: {', '.join(sha256_kernels)})")
    print(f"fold           {fold} (available: {', '.join(fold_kernels)})")
    print(f"NumPy          {np.__version__}")
    print(f"Python         {platform.python_implementation()} {platform.python_version()} on {found['platform']}")
    return 0

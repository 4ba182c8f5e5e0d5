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
import re
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from . import __version__
from ._codec import family_name, sha256_kernel
from ._round import fold_kernel
from .console import to_text
from .frames import Codec
from .jsonform import from_json, to_json
from .messages import Reserved
from .protocol import CONTROL_HEADER, VERSIONS, parse_salt

__all__ = ["COMMANDS", "REVISIONS", "build_parser", "count", "main", "salt", "salt_file"]

REVISIONS = [revision.value for revision in VERSIONS]

#: Commands with a module of their own, and what each does.
COMMANDS = {
    "inspect": ("report", "show what is in packets, a capture, a recorded stream or a single frame"),
    "top": ("top", "show the status of a live controller, again and again"),
    "bench": ("bench", "measure this machine: messages, rounds, MAC, fold"),
    "demo": ("demo", "train three ranks on real data, over sockets"),
    "join": ("join", "enter a cluster and start a command for each rank of this host"),
    "completion": ("completion", "print what makes a shell complete these commands and options"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 fine, 1 what it looked at is bad, 2 wrong use, 130 interrupted.

    Raises:
        SystemExit: code 2 for a wrong use, 0 after ``--help`` and ``--version``.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(argv[:1])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(getattr(args, "parser", parser), unknown)
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


def build_parser(wanted: Collection[str] = ()) -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Args:
        wanted: the commands of modules of their own whose options it is to know; it knows the names of all.
    """
    about = "Read, write and check the traffic of flodl clusters."
    parser = argparse.ArgumentParser(prog="flodl-fast", description=about)
    parser.add_argument("--version", action="version", version=f"flodl_fast {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(parser=sub)
        return sub

    encode = command("encode", "turn JSON lines on standard input, each a message, into frames")
    decode = command("decode", "turn JSON lines on standard input, each a frame, into messages")
    info = command("info", "name the version, the revisions spoken and the kernels in use")
    info.add_argument("--json", action="store_true", help="print a JSON object, for programs")
    info.set_defaults(run=_info)
    for sub, run in ((encode, _encode), (decode, _decode)):
        sub.set_defaults(run=run)
        sub.add_argument("--revision", choices=REVISIONS, default="0.6", help="the wire's (default: %(default)s)")

    # Each has a module of its own, which it alone needs.
    for name, (module_name, help) in COMMANDS.items():
        sub = command(name, help)
        if name in wanted:
            module = importlib.import_module(f".{module_name}", __package__)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit as argparse does, but with the command's own usage and the options that may have been meant."""
    options = set(re.findall(r"--[a-z-]+", parser.format_help()))
    close = [match for word in unknown for match in get_close_matches(word.partition("=")[0], options, n=1)]
    hint = f"; did you mean {' and '.join(dict.fromkeys(close))}?" if close else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def salt(text: str) -> bytes:
    """A salt as an argument's type; its errors never show it."""
    try:
        return parse_salt(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # argparse's own message would show the salt


def salt_file(name: str) -> bytes:
    """The salt that a file holds, as an argument's type; its errors never show the salt."""
    try:
        return salt(Path(name).read_text(encoding="ascii"))
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{name} holds no salt: it must be 32 hex digits and nothing else") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read a salt from {name}: {error}") from None


def count(text: str) -> int:
    """A positive number as an argument's type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


# --------------------------------------------------------------------------------------------------- encode and decode


def _encode(args: argparse.Namespace) -> int:
    def answer(case: dict[str, Any]) -> dict[str, Any]:
        _need(case, "salt", "kind", "msg")
        codec = _codec(_text(case, "salt"), args.revision)
        frame = codec.encode(from_json(_text(case, "kind"), case["msg"], revision=args.revision))
        return {"payload": frame[CONTROL_HEADER:].hex(), "frame": frame.hex()}

    return _answer_lines(answer)


def _decode(args: argparse.Namespace) -> int:
    def answer(case: dict[str, Any]) -> dict[str, Any]:
        _need(case, "salt", "frame")
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


def _need(case: dict[str, Any], *names: str) -> None:
    lacking = [name for name in names if name not in case]
    if lacking:
        raise ValueError(f"a line has {', '.join(names)}; this one lacks {', '.join(lacking)}")


def _text(case: dict[str, Any], name: str) -> str:
    value = case[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
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
        print(to_text(found), flush=True)
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
        print(to_text(found))
        return 0
    print(f"flodl_fast     {__version__}")
    print(f"revisions      {', '.join(REVISIONS)}")
    print(f"SHA-256        {sha256} (available: {', '.join(sha256_kernels)})")
    print(f"fold           {fold} (available: {', '.join(fold_kernels)})")
    print(f"NumPy          {np.__version__}")
    print(f"Python         {platform.python_implementation()} {platform.python_version()} on {found['platform']}")
    return 0

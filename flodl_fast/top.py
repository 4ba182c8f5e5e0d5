"""``python -m flodl_fast top``: the status page of a live controller, asked again and again."""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import nullcontext
from typing import Any

from .console import print_table, rich_console, to_text
from .status import address, fetch_state, headline, word

__all__ = ["add_arguments", "run"]

_OVER = ("done", "failed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("controller", type=address, metavar="HOST:PORT", help="where the controller listens")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="look once and end")
    parser.add_argument("--json", action="store_true", help="print each answer as a JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Show the status until the run is over; the exit code: 0 fine, 1 the run failed or nobody answers as it should."""
    console = None if args.json or args.once else rich_console()
    before: str | None = None
    if console is None:
        live: Any = nullcontext()
    else:
        from rich.live import Live

        live = Live(console=console, auto_refresh=False)
    with live:
        while True:
            try:
                state = fetch_state(args.controller)
            except (OSError, ValueError) as error:
                if before is not None:
                    print("the controller is gone", file=sys.stderr)
                    return 0
                host, port = args.controller
                print(f"flodl-fast top: error: no status at {host}:{port}: {error}", file=sys.stderr)
                return 1
            text = to_text(state)
            if args.json:
                print(text, flush=True)
            elif console is not None:
                live.update(_drawn(state), refresh=True)
            elif text != before:  # a plain output repeats only what is new
                _print(state)
                sys.stdout.flush()
            before = text
            phase = "waiting" if state is None else state["phase"]
            if args.once or phase in _OVER:
                return 1 if phase == "failed" else 0
            time.sleep(args.interval)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}")
    return value


_COLUMNS = ("host", " ranks", " devices", "GPUs", "libtorch", " joined at s")


def _members(state: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """The hosts, a row each."""
    return [
        (
            word(member.get("host")), word(member.get("ranks")), word(member.get("local_devices")),
            word(member.get("gpus")), word(member.get("libtorch")), word(member.get("joined_at_secs")),
        )
        for member in (() if state is None else state["members"])
    ]


def _print(state: dict[str, Any] | None) -> None:
    print(headline(state))
    members = _members(state)
    if members:
        print_table("Hosts", _COLUMNS, members)


def _drawn(state: dict[str, Any] | None) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="cyan")
    for column in _COLUMNS:
        table.add_column(column.strip(), justify="right" if column.startswith(" ") else "left")
    for row in _members(state):
        table.add_row(*map(Text, row))
    return Group(Text(headline(state), style="bold"), table)

"""``python -m flodl_fast inspect``: the frames of a file as a table, as JSON lines, as sums or as a picture."""

from __future__ import annotations

import argparse
import reprlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from enum import IntEnum
from importlib.util import find_spec
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from .capture import Readable
from .cli import REVISIONS, count, salt, salt_file
from .console import missing, print_table, rich_console, to_text
from .display import plural
from .errors import DecodeError
from .inspection import BAD, FRAMINGS, OK, Entry, Inspection, Tensor, every_kind, inspect_frames
from .summary import Summary, label, rank_of

__all__ = ["add_arguments", "run"]

POLL = 0.2  # seconds between two looks at a file that is followed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("file", metavar="FILE", help="the file, or - for standard input")
    salts = parser.add_mutually_exclusive_group()
    salts.add_argument("--salt", type=salt, metavar="HEX", help="check MACs with this session salt, 32 hex digits")
    salts.add_argument("--salt-file", type=salt_file, dest="salt", metavar="FILE", help="the same, from a file")
    parser.add_argument("--framing", choices=FRAMINGS, default="auto", help="how bytes are framed (default: auto)")
    parser.add_argument(
        "--revision", choices=REVISIONS, help="the wire's (default: the capture's own, else as the frames tell)"
    )
    parser.add_argument(
        "--kind", action="append", type=_kind, metavar="WORD",
        help="only frames of this name, such as timing, batch, round or model; may be given again",
    )
    parser.add_argument(
        "--rank", action="append", type=_rank, metavar="N", help="only frames of this rank; may be given again"
    )
    parser.add_argument("--limit", type=count, metavar="N", help="stop after N frames")
    parser.add_argument("--follow", action="store_true", help="wait for more at the end of the file, until Ctrl-C")
    parser.add_argument("--summary", action="store_true", help="only what all frames come to")
    parser.add_argument("--plot", metavar="PNG", help="draw loss, step times and round times over the run")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line, for programs")


def run(args: argparse.Namespace) -> int:
    """Show what is in the file and return the exit code: 0 fine, 1 something is wrong in it, 2 it cannot be read."""
    if args.plot is not None and find_spec("matplotlib") is None:
        return missing("matplotlib", "plot")
    piped = args.file == "-"
    try:
        file = open(sys.stdin.fileno() if piped else args.file, "rb", closefd=not piped)  # noqa: SIM115
    except OSError as error:
        print(f"flodl-fast inspect: error: {error}", file=sys.stderr)
        return 2
    with file:
        entries = inspect_frames(
            _Following(file) if args.follow else file, salt=args.salt, framing=args.framing, revision=args.revision
        )
        found = _Findings(args, entries)
        try:
            return found.show()
        except KeyboardInterrupt:
            if not args.follow:
                raise
            found.end()
            return 130


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a rank, got {text!r}")
    return int(text)


def _kind(text: str) -> str:
    """A word that some frame can be chosen by, in lower case."""
    kinds = list(every_kind())
    if any(text.lower() in _names(entry) for entry in kinds):
        return text.lower()
    known = {word.lower(): word for entry in kinds for word in (entry.frame, entry.kind, entry.name) if word}
    close = [known[word] for word in get_close_matches(text.lower(), known, cutoff=0.7)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(known.values()))}"
    raise argparse.ArgumentTypeError(f"no frame is called {text!r}; {hint}")


class _Following:
    """A file whose end is not the end: more may be written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Readable = file  # type: ignore[assignment]

    def read1(self, size: int) -> bytes:
        while not (piece := self._file.read1(size)):
            sys.stdout.flush()
            time.sleep(POLL)
        return piece


class _Findings:
    """Goes through the entries once, for all that was asked for."""

    def __init__(self, args: argparse.Namespace, entries: Inspection) -> None:
        self._args = args
        self._entries = entries
        self._summary = Summary()
        self._view = _JsonLines() if args.json else _Table()
        self._limited = False
        self._read = 0

    def show(self) -> int:
        """Show the frames and what they come to; the exit code."""
        code = 0
        try:
            for index, entry in self._chosen():
                self._summary.add(index, entry)
                if not self._args.summary:
                    self._view.show(index, entry)
                if not entry.good:
                    code = 1
        except DecodeError as error:
            self._view.fail(self._summary.frames, error)
            code = 1
        self.end()
        if self._args.plot is not None:
            return self._plot() or code
        return code

    def end(self) -> None:
        """Show the sums."""
        if self._args.summary:
            self._view.sums(self._summary, self._entries)
        else:
            self._view.end(self._summary, self._entries, self._limited)
        if self._read and not self._summary.frames:
            print(f"none of {plural(self._read, 'frame')} is what --kind and --rank ask for", file=sys.stderr)

    def _chosen(self) -> Iterator[tuple[int, Entry]]:
        """The entries to show, each with its number in the file."""
        yield from islice(self._asked_for(), self._args.limit)
        self._limited = self._summary.frames == self._args.limit

    def _asked_for(self) -> Iterator[tuple[int, Entry]]:
        kinds, ranks = self._args.kind, self._args.rank
        for index, entry in enumerate(self._entries):
            self._read = index + 1
            if (not kinds or not _names(entry).isdisjoint(kinds)) and (not ranks or rank_of(entry) in ranks):
                yield index, entry

    def _plot(self) -> int:
        from .plots import plot_run

        if not plot_run(self._summary, self._args.plot):
            print("Nothing to draw: no Batch message and no round with times.", file=sys.stderr)
            return 1
        return 0


def _names(entry: Entry) -> set[str]:
    """The words that ``--kind`` may choose a frame by."""
    words = {word.lower() for word in (entry.frame, entry.kind, entry.name, label(entry)) if word}
    return words if entry.inner is None else words | _names(entry.inner)


class _JsonLines:
    """An object for each frame, one for what ended the reading early."""

    def show(self, index: int, entry: Entry) -> None:
        print(to_text({"index": index, **entry.to_json()}))

    def fail(self, index: int, error: DecodeError) -> None:
        print(to_text({"index": index, "offset": error.offset, "error": str(error)}))

    def sums(self, summary: Summary, entries: Inspection) -> None:
        revision, why = entries.revision
        print(to_text({**summary.to_json(), "revision": revision.value, "reason": why, "notes": entries.notes}))

    def end(self, summary: Summary, entries: Inspection, limited: bool) -> None:
        pass


class _Brief(reprlib.Repr):
    """Values as short text; what could steer a terminal comes out escaped."""

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.6g}"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return f"<{len(value)} bytes>"


_brief = _Brief().repr


class _Column(NamedTuple):
    """A column of the table; a negative width is to the left."""

    title: str
    width: int
    style: str = ""


# Frames of a capture have three more columns.
_COLUMNS = (
    _Column("#", 6, "dim"), _Column("offset", 10, "dim"), _Column("time s", 10), _Column("leg", -14),
    _Column("way", -4), _Column("frame", -28, "bold"), _Column("rank", 4, "cyan"), _Column("epoch", 5),
    _Column("step", 7), _Column("bytes", 9), _Column("payload", 9), _Column("MAC", -11), _Column("", 0),
)
_CAPTURE_COLUMNS = range(2, 5)
_FRAME_COLUMN = 5
_MAC_COLUMN = 11
_MAC_STYLES = {"ok": "green", BAD: "bold red"}
_TENSORS_SHOWN = 4
_ROUNDS_SHOWN = 40
_RANKS_SHOWN = 12
_GAPS_SHOWN = 3
_SECRETS = ("salt_hex", "envelope_hex", "relay_spec_hex")  # of Join messages; each holds the session's salt


class _Table:
    """A line for each frame as it is read, more where it carries tensors or another frame, and the sums at the end."""

    def __init__(self) -> None:
        self._console = rich_console()
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._columns: list[int] = []
        self._start_ns = 0

    def show(self, index: int, entry: Entry) -> None:
        if not self._columns:
            captured = entry.time_ns is not None
            self._columns = [i for i in range(len(_COLUMNS)) if captured or i not in _CAPTURE_COLUMNS]
            self._start_ns = entry.time_ns or 0
            self._print([column.title for column in _COLUMNS], "bold cyan")
        self._lines(str(index), entry, "")

    def fail(self, index: int, error: DecodeError) -> None:
        self._say(f"ERROR at byte {error.offset}, after {plural(index, 'frame')}: {error}", "bold red")

    def end(self, summary: Summary, entries: Inspection, limited: bool) -> None:
        if limited:
            self._say(f"stopped after {plural(summary.frames, 'frame')} (--limit)")
        most = sorted(summary.kinds.items(), key=lambda item: -item[1][0])
        counts = ", ".join(f"{n} {name}" for name, (n, _) in most)
        total = f"{plural(summary.frames, 'frame')}, {plural(summary.nbytes, 'byte')}"
        self._say(f"{total}: {counts}" if counts else total)
        self._trust(summary, entries)
        self._notes(entries)

    def sums(self, summary: Summary, entries: Inspection) -> None:
        """The sums in tables."""
        _show_kinds(summary)
        _show_legs(summary)
        _show_beats(summary)
        _show_rounds(summary)
        if summary.bad:
            rows = [(index, leg) for index, leg in summary.bad]
            print_table(f"MACs that do not hold: {summary.macs[BAD]}, the first of them", [" #", "leg"], rows)
        if sys.stdout.isatty() or summary.frames:
            print()
        seconds = ((summary.end_ns or 0) - (summary.start_ns or 0)) / 1e9
        took = f" in {seconds:.3f} s" if summary.start_ns is not None else ""
        self._say(f"{plural(summary.frames, 'frame')}, {plural(summary.nbytes, 'byte')}{took}")
        self._trust(summary, entries)
        if summary.faults:
            self._say(f"{plural(summary.faults, 'frame')} with a FAULT", "bold red")
        self._notes(entries)

    def _trust(self, summary: Summary, entries: Inspection) -> None:
        """How the MACs stand, and as what the frames were read."""
        if summary.macs:
            if summary.macs[BAD] and not summary.macs[OK]:
                self._say("no MAC holds: most likely the frames were made with another salt", "bold red")
            self._say("MAC: " + ", ".join(f"{n} {mac}" for mac, n in summary.macs.most_common()))
            revision, why = entries.revision
            self._say(f"read as revision {revision.value}: {why}")

    def _notes(self, entries: Inspection) -> None:
        for note in entries.notes:
            self._say(note)

    def _lines(self, index: str, entry: Entry, indent: str) -> None:
        seen = ("", "", "")
        if entry.time_ns is not None and entry.direction is not None and entry.leg is not None:
            seen = (f"{(entry.time_ns - self._start_ns) / 1e9:.6f}", _safe(entry.leg), entry.direction.name.lower())
        numbers = (entry.rank, entry.epoch, entry.step, entry.size, entry.payload)
        self._print([
            index, str(entry.offset), *seen, indent + label(entry),
            *("" if number is None else str(number) for number in numbers), entry.mac, _details(entry),
        ])
        below = []
        if entry.tensors is not None:
            below.append((_tensors(entry.tensors), "dim"))
        below += [(f"note: {note}", "yellow") for note in entry.notes]
        if entry.fault is not None:
            below.append((f"FAULT: {entry.fault}", "bold red"))
        margin = sum(abs(_COLUMNS[i].width) + 1 for i in self._columns if i < _FRAME_COLUMN)
        for line, style in below:
            self._say(" " * margin + indent + "  " + line, style)
        if entry.inner is not None:
            self._lines("", entry.inner, indent + "  ")

    def _print(self, cells: Sequence[str], style: str | None = None) -> None:
        columns = ((cells[i], _COLUMNS[i].width) for i in self._columns)
        *row, details = (f"{cell:{'>' if width > 0 else '<'}{abs(width)}}" for cell, width in columns)
        room = len(details)
        if self._width is not None:
            room = max(0, self._width - sum(len(cell) + 1 for cell in row))
        if len(details) > room:
            details = details[: room - 1] + "…" if room else ""
        if self._console is None:
            print(f"{' '.join(row)} {details}".rstrip())
            return
        from rich.text import Text

        styles = [_MAC_STYLES.get(cells[i], "") if i == _MAC_COLUMN else _COLUMNS[i].style for i in self._columns]
        line = Text(" ").join(Text(cell, style or of) for cell, of in zip([*row, details], styles, strict=True))
        line.rstrip()
        self._console.print(line)

    def _say(self, line: str, style: str = "") -> None:
        if self._console is None:
            print(line)
        else:
            self._console.print(line, style=style or None, markup=False)


def _show_kinds(summary: Summary) -> None:
    ranks = sorted({rank for _, rank in summary.ranks if rank is not None})
    if len(ranks) > _RANKS_SHOWN:
        ranks = []
    rows = [
        (name, n, f"{nbytes:,}", *(summary.ranks[name, rank] or None for rank in ranks))
        for name, (n, nbytes) in sorted(summary.kinds.items())
    ]
    if rows:
        print_table("Frames", ["frame", " count", " bytes", *(f" rank {rank}" for rank in ranks)], rows)


def _show_legs(summary: Summary) -> None:
    rows = [
        (_safe(leg), direction.name.lower(), n, f"{nbytes:,}")
        for (leg, direction), (n, nbytes) in sorted(summary.legs.items())
    ]
    if rows:
        print_table("Legs", ["leg", "way", " frames", " bytes"], rows)


def _show_beats(summary: Summary) -> None:
    rows = []
    for name, n, longest, gaps in summary.beats():
        shown = ", ".join(f"{seconds:.1f} s at {at:.1f} s" for at, seconds in gaps[:_GAPS_SHOWN])
        more = f", {len(gaps) - _GAPS_SHOWN} more" if len(gaps) > _GAPS_SHOWN else ""
        rows.append((name, n, f"{longest:.2f} s" if n > 1 else None, shown + more or "none"))
    if rows:
        print_table("Heartbeats, of which one is due each second", ["from", " count", " longest", "gaps"], rows)


def _show_rounds(summary: Summary) -> None:
    for tier, title in (("ranks", "Rounds of ranks"), ("hosts", "Rounds of hosts with the controller")):
        rounds = [found for found in summary.rounds if found.tier == tier]
        times = summary.round_times(tier)
        if times is not None:
            shortest, median, longest = (1e3 * seconds for seconds in times)
            title += f", {shortest:.3g} / {median:.3g} / {longest:.3g} ms (shortest, median, longest)"
        rows = [
            (
                found.number,
                found.kind,
                None if found.began_ns is None else f"{(found.began_ns - (summary.start_ns or 0)) / 1e9:.3f}",
                None if found.seconds is None else f"{found.seconds * 1e3:.3g}",
                f"{found.nbytes:,}",
                ", ".join(f"{_safe(leg)}: {weight:.6g}" for leg, weight in sorted(found.sent.items())),
                None if found.reply is None else f"{found.reply:.6g}",
            )
            for found in rounds[:_ROUNDS_SHOWN]
        ]
        if rows:
            columns = [" #", "kind", " at s", " ms", " bytes", "weights sent", " reply"]
            print_table(title, columns, rows)
        if len(rounds) > _ROUNDS_SHOWN:
            print(f"  … and {len(rounds) - _ROUNDS_SHOWN} more, which --json has")


def _safe(text: str) -> str:
    return text if text.isprintable() else _brief(text)


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
    return f"{plural(len(tensors), 'tensor')}, {plural(total, 'byte')}" + (": " if shown else "") + ", ".join(shown)

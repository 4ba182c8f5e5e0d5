"""A capture as an object of a notebook; a TensorLayout shows itself as a table without this (docs/frameworks.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .display import ROWS, plural, table
from .errors import DecodeError
from .inspection import Entry, inspect_frames
from .protocol import Revision
from .summary import label, rank_of

__all__ = ["Capture"]

_HEAD = ("#", "time s", "leg", "way", "frame", "rank", "bytes", "MAC", "")


class Capture:
    """The frames of a file, read anew each time they are gone through; in a notebook a table of the first ones.

    Args:
        path: a capture, packets in pcap or pcapng form, the bytes of one stream, or one frame.
        salt: the session salt, 16 bytes or 32 hex digits; None checks no MAC.
        revision: the revision to read as; None is the capture's own, elsewhere what the frames tell.

    Raises:
        OSError: from the iteration: the file cannot be read.
        DecodeError: from the iteration: the bytes from ``.offset`` on are no frame.
        ValueError, TypeError: from the iteration: as ``Codec``.
    """

    def __init__(
        self, path: str | os.PathLike[str], salt: bytes | str | None = None, revision: Revision | str | None = None
    ) -> None:
        self._path = path
        self._salt = salt
        self._revision = revision

    def __iter__(self) -> Iterator[Entry]:
        with open(self._path, "rb") as file:
            yield from inspect_frames(file, salt=self._salt, revision=self._revision)

    def __repr__(self) -> str:
        return f"Capture({os.fspath(self._path)!r}, {self._read([])})"

    def _repr_html_(self) -> str:
        first: list[Entry] = []
        words = self._read(first)
        began = next((entry.time_ns for entry in first if entry.time_ns is not None), 0)
        rows = [
            (
                number,
                "" if entry.time_ns is None else f"{(entry.time_ns - began) / 1e9:.6f}",
                entry.leg,
                "" if entry.direction is None else entry.direction.name.lower(),
                label(entry),
                rank_of(entry),
                entry.size,
                entry.mac,
                entry.fault or "; ".join(entry.notes),
            )
            for number, entry in enumerate(first)
        ]
        return table(f"{os.fspath(self._path)}: {words}", _HEAD, rows)

    def _read(self, first: list[Entry]) -> str:
        """What all frames come to, in words; the first ones are added to the list."""
        frames = size = bad = 0
        legs = set()
        end = ""
        try:
            for entry in self:
                if frames < ROWS:
                    first.append(entry)
                frames += 1
                size += entry.size
                bad += not entry.good
                legs.add(entry.leg)
        except DecodeError as error:
            end = f", then no frame: {error}"
        legs.discard(None)
        counts = [plural(frames, "frame"), plural(size, "byte")]
        counts += [plural(len(legs), "leg")] if legs else []
        counts += [f"{bad:,} faulty"] if bad else []
        return ", ".join(counts) + end

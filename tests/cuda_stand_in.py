"""CUDA's order of work without a GPU: streams that do what they are given at the last moment that CUDA allows.

Whatever a stream was given waits until somebody waits for it; so a copy that nobody waited for has not happened yet,
and one that reads memory reads what is there when it is waited for. Work that lacks an order it needs ends in wrong
values. Every call is noted in ``CALLS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CALLS: list[tuple[str, ...]] = []


class Stream:
    """A stream of either library."""

    current: Stream

    def __init__(self, *_: Any, name: str = "side", **__: Any) -> None:
        self.name = name
        self._work: list[Callable[[], object]] = []
        self._done = 0

    def give(self, call: str, work: Callable[[], object]) -> None:
        CALLS.append((self.name, call))
        self._work.append(work)

    def finish(self, upto: int | None = None) -> None:
        """Do what it was given, up to a point."""
        upto = len(self._work) if upto is None else upto
        while self._done < upto:
            self._done += 1
            self._work[self._done - 1]()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.give("wait", event.finish)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record())

    def __enter__(self) -> Stream:
        self._before, Stream.current = Stream.current, self
        return self

    def __exit__(self, *_: Any) -> None:
        Stream.current = self._before


class Event:
    """An event of either library."""

    def __init__(self, **_: Any) -> None:
        self._at: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        CALLS.append((stream.name, "record"))
        self._at = stream, len(stream._work)

    def finish(self) -> None:
        assert self._at is not None
        stream, upto = self._at
        stream.finish(upto)

    def synchronize(self) -> None:
        CALLS.append(("host", "synchronize"))
        self.finish()


def restart() -> Stream:
    """A machine without any work; its current stream."""
    CALLS.clear()
    Stream.current = Stream(name="caller")
    return Stream.current


def check(tensors: Any, mine: list[Any], kernel: Callable[[Any], None], read: Callable[[Any], Any]) -> None:
    """Two averages with kernels of the caller's around them, whose order only streams and events keep.

    Args:
        tensors: the Tensors of these arrays.
        mine: arrays of the device, all ones.
        kernel: gives the caller's stream the work of adding 1 to an array.
        read: an array's values once the caller's stream has done all its work.
    """
    for value in (1, 100):
        for array in mine:
            kernel(array)
        tensors.pull()
        assert [set(a.ravel().tolist()) for a in tensors.arrays] == [{value + 1.0}] * len(mine)
        tensors.adopt([a * 0 + 99 for a in tensors.arrays])
        for array in mine:
            kernel(array)
    assert [set(read(array).ravel().tolist()) for array in mine] == [{100.0}] * len(mine)

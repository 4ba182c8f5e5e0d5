"""What a benchmark is, and how its time is taken."""

from __future__ import annotations

import gc
from collections.abc import Callable
from timeit import Timer
from typing import Any, NamedTuple


class Work(NamedTuple):
    """A call to time.

    Attributes:
        holds: whether a result of the call is right; a time counts only if it is.
        function, args: the call.
    """

    holds: Callable[[Any], bool]
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def least(work: Work, seconds: float, windows: int) -> float:
    """The seconds that one call takes: the mean over a window of so many seconds, the least of several windows.

    The crate's own bench measures likewise, with five windows of 0.2 s for messages and 0.4 s for frames. The
    garbage collector stays on, as in a program. The result of a call is dropped within the time taken.

    Raises:
        ValueError: the call gives a wrong result.
    """
    if not work.holds(work.function(*work.args)):
        raise ValueError("a wrong result")
    names = {f"a{i}": arg for i, arg in enumerate(work.args)}
    timer = Timer(
        f"function({', '.join(names)})", "gc.enable()", globals={"gc": gc, "function": work.function, **names}
    )
    number = 1
    while (took := timer.timeit(number)) < seconds / 10:
        number *= 4
    number = max(1, round(number * seconds / took))
    return min(timer.repeat(windows, number)) / number

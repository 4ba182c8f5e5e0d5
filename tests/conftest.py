"""What all tests share: the golden vectors, the salt of the public cases, the reference peer."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from peer import Peer, build, find_cargo

REVISIONS = ("0.6", "0.7", "0.8")
GOLDEN = Path(__file__).parent / "golden"
SALT = bytes(range(16))


# Ignored in a suite that a shell has started in the background, and so in every process that its tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def golden(name: str, revision: str = "0.6") -> list[dict[str, Any]]:
    """The cases of golden/<revision>/<name>.jsonl, with that revision. Shared: do not change them."""
    lines = (GOLDEN / revision / f"{name}.jsonl").read_bytes().splitlines()
    return [{"revision": revision, **json.loads(line)} for line in lines]


def golden_params(*names: str, revisions: tuple[str, ...] = REVISIONS) -> list[Any]:
    """The cases of these files as parameters with an id of revision, file and line."""
    return [
        pytest.param(case, id=f"{revision}-{name}-{line}")
        for revision in revisions
        for name in names
        for line, case in enumerate(golden(name, revision), 1)
    ]


def same(got: Any, expected: Any) -> bool:
    """Equal as JSON text, so that -0.0 is not 0.0, 1 not 1.0 and a NaN is a NaN; map order aside."""
    return json.dumps(got, sort_keys=True) == json.dumps(expected, sort_keys=True)


@pytest.fixture(scope="session")
def peer_build() -> Callable[[str], Path]:
    """`peer_build("0.6")` is the reference peer's binary of that revision."""
    if sys.platform != "linux":
        pytest.skip("the reference peer is linked without libtorch, by flags of Linux linkers")
    cargo = find_cargo()
    if cargo is None:
        pytest.skip("the reference peer is built by cargo, which is not installed")
    return cache(lambda revision: build(cargo, f"{revision}.0"))


@pytest.fixture(scope="session")
def peer_binary(peer_build: Callable[[str], Path]) -> Path:
    """The reference peer of 0.6.0."""
    return peer_build("0.6")


@pytest.fixture(scope="session")
def peer(peer_build: Callable[[str], Path]) -> Iterator[Callable[..., Peer]]:
    """`peer("encode", "0.7")` is the reference peer's process of that mode and revision, one a session."""
    with ExitStack() as stack:
        yield cache(lambda mode, revision="0.6": stack.enter_context(Peer(peer_build(revision), mode)))


@pytest.fixture(params=REVISIONS)
def revision(request: pytest.FixtureRequest) -> str:
    """Every revision in turn."""
    return request.param


@pytest.fixture
def coordinator() -> Iterator[Any]:
    """A controller and coordinator by hand, of revision 0.6."""
    from worker_support import Coordinator  # Not for the oracle's suites, which import nothing of the package.

    coordinator = Coordinator()
    yield coordinator
    coordinator.close()

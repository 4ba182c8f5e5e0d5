"""What all tests share: the golden vectors, the salt of the public cases, the reference peer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from peer import Peer, build, find_cargo

GOLDEN = Path(__file__).parent / "golden"
SALT = bytes(range(16))


@cache
def golden(name: str, revision: str = "0.6") -> list[dict[str, Any]]:
    """The cases of golden/<revision>/<name>.jsonl. Shared: do not change them."""
    return [json.loads(line) for line in (GOLDEN / revision / f"{name}.jsonl").read_bytes().splitlines()]


def golden_params(*names: str, revision: str = "0.6") -> list[Any]:
    """The cases of these files as parameters with an id of file and line."""
    return [
        pytest.param(case, id=f"{name}-{line}")
        for name in names
        for line, case in enumerate(golden(name, revision), 1)
    ]


def same(got: Any, expected: Any) -> bool:
    """Equal as JSON text, so that -0.0 is not 0.0, 1 not 1.0 and a NaN is a NaN; map order aside."""
    return json.dumps(got, sort_keys=True) == json.dumps(expected, sort_keys=True)


@pytest.fixture(scope="session")
def peer_binary() -> Path:
    """The reference peer of 0.6.0."""
    if sys.platform != "linux":
        pytest.skip("the reference peer is linked without libtorch, by flags of Linux linkers")
    cargo = find_cargo()
    if cargo is None:
        pytest.skip("the reference peer is built by cargo, which is not installed")
    return build(cargo)


@pytest.fixture(scope="session")
def peer(peer_binary: Path) -> Iterator[Callable[[str], Peer]]:
    """`peer("encode")` is the reference peer's process of that mode, one a session."""
    with ExitStack() as stack:
        yield cache(lambda mode: stack.enter_context(Peer(peer_binary, mode)))

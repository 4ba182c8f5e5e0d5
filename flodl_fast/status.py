"""The status page of a controller, ``GET /state.json`` at its port (docs/wire.md §7)."""

from __future__ import annotations

import argparse
import http.client
import json
from typing import Any

from .channel import Address
from .console import to_text

__all__ = ["address", "fetch_state", "headline", "word"]

PATIENCE = 2.0  # seconds that the next bytes of an answer may take
LARGEST = 16 << 20  # bytes of a page, far above what a cluster's takes

_KEYS = {"phase", "joined_ranks", "joined_hosts", "min_rank_start", "target_ranks", "members"}


def address(text: str) -> Address:
    """HOST:PORT as an argument's type; an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def fetch_state(controller: Address) -> dict[str, Any] | None:
    """What the page says; None where the controller has nothing to say yet (503).

    Raises:
        OSError: nobody answers.
        ValueError: what answers is no controller's status page.
    """
    connection = http.client.HTTPConnection(*controller, timeout=PATIENCE)
    try:
        connection.request("GET", "/state.json")
        response = connection.getresponse()
        text = response.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"the answer is longer than {LARGEST >> 20} MiB")
        if response.status == http.client.SERVICE_UNAVAILABLE:
            return None
        state = json.loads(text)
        to_text(state)  # No NaN and no infinity, so that it can be passed on.
    except http.client.HTTPException as error:
        raise ValueError(f"no HTTP answer: {type(error).__name__}") from None
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None
    finally:
        connection.close()
    if (
        isinstance(state, dict)
        and state.keys() >= _KEYS
        and isinstance(state["phase"], str)
        and isinstance(state["members"], list)
        and all(isinstance(member, dict) for member in state["members"])
    ):
        return state
    raise ValueError("the answer is no controller's status")


def headline(state: dict[str, Any] | None) -> str:
    """The page in a line: the run's phase, its ranks, and while the join window is open what may close it."""
    if state is None:
        return "the controller is up and has published nothing yet"
    said = {name: word(value) for name, value in state.items()}
    wanted = said["target_ranks"] if state["target_ranks"] else f"at least {said['min_rank_start']}"
    told = f"{said['phase']}: {said['joined_ranks']} of {wanted} ranks on {said['joined_hosts']} host(s)"
    if state["phase"] not in ("waiting", "staging"):
        return told
    # Of 0.8: unless "auto", the window is held for a POST /start.
    if said.get("start_mode", "auto") != "auto":
        told += f", start {said['start_mode']}, {'given' if state.get('start_armed') else 'not given yet'}"
    # The page is written anew only where something changes: these run down in between.
    limits = (("window open", "window_remaining_secs"), ("gives up in", "cap_remaining_secs"))
    left = [f"{words} {said[name]} s" for words, name in limits if said.get(name)]
    return f"{told}; at the last change {', '.join(left)}" if left else told


def word(value: Any) -> str:
    """A value of the page, or a list of them, as text that cannot steer a terminal; what is nested deeper is "…"."""
    values = value if isinstance(value, list) else [value]
    text = ", ".join("…" if isinstance(item, (list, dict)) else str(item) for item in values if item is not None)
    return text if text.isprintable() else ascii(text)

"""The status page of a controller, ``GET /state.json`` at its port (docs/wire.md §7)."""

from __future__ import annotations

import argparse
import http.client
import json
from typing import Any

from .channel import Address

__all__ = ["address", "fetch_state", "headline", "word"]

PATIENCE = 2.0  # seconds that the next bytes of an answer may take
LARGEST = 16 << 20  # bytes of a page, far above what a cluster's takes

_KEYS = {"phase", "joined_ranks", "joined_hosts", "min_rank_start", "target_ranks", "members"}


def address(text: str) -> Address:
    """HOST:PORT as an argument's type; an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
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
    wanted = state["target_ranks"] or f"at least {state['min_rank_start']}"
    told = f"{state['phase']}: {state['joined_ranks']} of {wanted} ranks on {state['joined_hosts']} host(s)"
    if state["phase"] not in ("waiting", "staging"):
        return word(told)
    # Of 0.8: unless "auto", the window is held for a POST /start.
    if (mode := state.get("start_mode", "auto")) != "auto":
        told += f", start {mode}, {'given' if state.get('start_armed') else 'not given yet'}"
    # The page is written anew only where something changes: these run down in between.
    limits = (("window open", "window_remaining_secs"), ("gives up in", "cap_remaining_secs"))
    left = [f"{words} {state[name]} s" for words, name in limits if state.get(name) is not None]
    return word(f"{told}; at the last change {', '.join(left)}" if left else told)


def word(value: Any) -> str:
    """A value of the page as text that cannot steer a terminal."""
    text = ", ".join(map(word, value)) if isinstance(value, list) else "" if value is None else str(value)
    return text if text.isprintable() else ascii(text)

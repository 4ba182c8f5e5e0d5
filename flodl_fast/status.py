"""The status page of a controller, ``GET /state.json`` at its port (docs/wire.md §7)."""

from __future__ import annotations

import argparse
import http.client
import json
from typing import Any

from .channel import Address

__all__ = ["address", "fetch_state"]

PATIENCE = 2.0  # seconds that an answer may take


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
        text = response.read()
        if response.status == http.client.SERVICE_UNAVAILABLE:
            return None
        state = json.loads(text)
    except http.client.HTTPException as error:
        raise ValueError(f"no HTTP answer: {type(error).__name__}") from None
    finally:
        connection.close()
    if not isinstance(state, dict) or not isinstance(state.get("phase"), str):
        raise ValueError("the answer is no controller's status")
    return state

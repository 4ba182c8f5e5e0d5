"""What a launcher tells a rank through its environment (docs/wire.md §8)."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .protocol import SALT_SIZE, Revision, parse_salt, supported_revision

__all__ = ["Environment"]

CLUSTER = "FLODL_INTERNAL_CLUSTER_JSON"
LOCAL_RANK = "FLODL_INTERNAL_LOCAL_RANK"
HOST_NAME = "FLODL_HOST_NAME"
ROUTE = "FLODL_FAST_ROUTE"
REVISION = "FLODL_FAST_REVISION"

# Other roles of the crate's launcher: a process that has one of these is not a rank.
_OTHER_ROLES = ("FLODL_INTERNAL_FULL_CLUSTER_JSON", "FLODL_INTERNAL_RELAY_JSON", "FLODL_INTERNAL_AGENT_JSON")

RELAY_DATA, RELAY_CONTROL = 4, 5  # ports of a host's relay, counted from the controller's


@dataclass(frozen=True)
class Environment:
    """One rank's place in its cluster.

    Attributes:
        rank: the rank to be, from 0 on over the whole cluster.
        world: the number of ranks of the cluster.
        host: the logical name of this host.
        controller: (host, port) of the controller.
        salt: the 16 bytes of the session salt.
        device: the index of the CUDA device that the launcher meant for this rank, as this process counts devices.
        direct: dial the controller itself instead of a relay on this host.
        revision: the cluster's revision of the wire.
        rank_resources: the controller asks for samples of this host's resources (0.7 on).
        data_path: where this host has the data set, if the cluster's configuration says so (0.8 on).
        gpu_ram_share: the share of a device's memory to use, likewise.
    """

    rank: int
    world: int
    host: str
    controller: tuple[str, int]
    salt: bytes = field(repr=False)
    device: int
    direct: bool
    revision: Revision = Revision.V0_6
    rank_resources: bool = False
    data_path: str | None = None
    gpu_ram_share: float | None = None

    @property
    def data(self) -> tuple[str, int]:
        """Where the data channel is dialled."""
        return self.controller if self.direct else ("127.0.0.1", self.controller[1] + RELAY_DATA)

    @property
    def control(self) -> tuple[str, int]:
        """Where the control channel is dialled."""
        return self.controller if self.direct else ("127.0.0.1", self.controller[1] + RELAY_CONTROL)

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read FLODL_INTERNAL_CLUSTER_JSON and what goes with it.

        Two are this package's own: FLODL_FAST_ROUTE, "relay", as if unset, or "direct"; and FLODL_FAST_REVISION, as the
        envelope does not tell which revision the cluster speaks: "0.6", as if unset, "0.7" or "0.8".

        Args:
            environ: the environment; ``os.environ`` if None.

        Raises:
            ValueError: a variable is missing, or what it holds cannot be; the message names the variable and the field,
                and never holds the salt.
        """
        environ = os.environ if environ is None else environ
        for name in _OTHER_ROLES:
            if name in environ:
                raise ValueError(f"{name} is set beside {CLUSTER}: this process is meant for another role than a rank")
        envelope = _Fields(CLUSTER, _unpack(_need(environ, CLUSTER)))
        worker, controller = envelope.part("worker"), envelope.part("controller")
        world = envelope.number("world_size", 1, 0xFFFFFFFF)
        envelope.number("num_workers", 1, world)
        host = worker.text("host")
        named = environ.get(HOST_NAME, "").strip() or socket.gethostname()
        if named != host:
            raise ValueError(f"{CLUSTER} is for host {host!r}, this is {named!r}; {HOST_NAME} can name it otherwise")
        ranks = worker.numbers("ranks", world - 1)
        index = _index(_need(environ, LOCAL_RANK), len(ranks))
        direct = _direct(environ)
        port = controller.number("port", 1, 65535 if direct else 65535 - RELAY_CONTROL)
        return cls(
            rank=ranks[index],
            world=world,
            host=host,
            controller=(controller.text("host"), port),
            salt=_salt(envelope),
            device=_device(environ, worker, index, len(ranks)),
            direct=direct,
            revision=_revision(environ),
            rank_resources=envelope.flag("rank_resources"),
            data_path=worker.text("data_path") if worker.has("data_path") else None,
            gpu_ram_share=worker.share("gpu_ram_share") if worker.has("gpu_ram_share") else None,
        )


class _Fields:
    """A JSON object whose fields are checked as they are read."""

    def __init__(self, where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a JSON object")
        self.where, self.value = where, value

    def get(self, name: str) -> Any:
        if name not in self.value:
            raise ValueError(f"{self.where}: {name} is missing")
        return self.value[name]

    def has(self, name: str) -> bool:
        return self.value.get(name) is not None

    def flag(self, name: str) -> bool:
        value = self.value.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} must be true or false, got {value!r}")
        return value

    def share(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{self.where}: {name} must be a number that is not negative, got {value!r}")
        return float(value)

    def part(self, name: str) -> _Fields:
        return _Fields(f"{self.where}: {name}", self.get(name))

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.where}: {name} must be text, got {value!r}")
        return value

    def number(self, name: str, low: int, high: int) -> int:
        return self._number(name, self.get(name), low, high)

    def numbers(self, name: str, high: int) -> list[int]:
        values = self.get(name)
        if not isinstance(values, list) or not values:
            raise ValueError(f"{self.where}: {name} must be a list of numbers, got {values!r}")
        return [self._number(name, value, 0, high) for value in values]

    def _number(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{self.where}: {name} must be a number from {low} to {high}, got {value!r}")
        return value


def _need(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ValueError(
            f"{name} is not set: a flodl launcher or `python -m flodl_fast join` sets it for each rank, and so does "
            "whoever starts one with LocalCluster.environment(rank)"
        )
    return environ[name].strip()


def _unpack(text: str) -> Any:
    try:
        return json.loads(bytes.fromhex(text))
    except (ValueError, RecursionError) as error:  # of hex, of UTF-8 and of JSON alike
        what = f"{type(error).__name__} in {len(text)} characters"
    # Not in the handler: the error holds the whole text, salt included, and would come along as the context.
    raise ValueError(f"{CLUSTER} is not the hex of a JSON object ({what})")


def _index(text: str, count: int) -> int:
    if not text.isdecimal() or int(text) >= count:
        raise ValueError(f"{LOCAL_RANK} must be from 0 to {count - 1}, one for each rank of this host, got {text!r}")
    return int(text)


def _salt(envelope: _Fields) -> bytes:
    text = envelope.value.get("salt")
    if text is None:
        return bytes(SALT_SIZE)
    if not isinstance(text, str):
        raise ValueError(f"{CLUSTER}: salt must be text")
    try:
        return parse_salt(text)
    except ValueError as error:
        raise ValueError(f"{CLUSTER}: {error}") from None


def _device(environ: Mapping[str, str], worker: _Fields, index: int, count: int) -> int:
    devices = list(range(count)) if worker.get("local_devices") == "all" else worker.numbers("local_devices", 255)
    if len(devices) != count:
        raise ValueError(f"{worker.where}: {count} ranks but {len(devices)} local_devices")
    pin = environ.get("CUDA_VISIBLE_DEVICES", "")
    return 0 if pin and "," not in pin else devices[index]


def _revision(environ: Mapping[str, str]) -> Revision:
    try:
        return supported_revision(environ.get(REVISION, Revision.V0_6.value))
    except ValueError as error:
        raise ValueError(f"{REVISION}: {error}") from None


def _direct(environ: Mapping[str, str]) -> bool:
    route = environ.get(ROUTE, "relay")
    if route not in ("relay", "direct"):
        raise ValueError(f'{ROUTE} must be "relay" or "direct", got {route!r}')
    return route == "direct"

"""Two network namespaces of Linux with a bad line between them, for threads that are to live in one of them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from types import TracebackType

import pytest

CLONE_NEWNET = 0x40000000
MTU = 1500


class Line:
    """A veth pair between two namespaces, 0 and 1, whose packets in either direction are late, lost and slow.

    By netem where the kernel has it. Elsewhere nftables loses the packets, tbf slows them down, and what is left to
    be late is in ``late``, for a proxy. Skips the test where none of this can be.

    Args:
        delay: seconds that a packet is under way.
        loss: percent of the packets.
        rate: of the line, as tc has it.

    Attributes:
        addresses: of the two ends.
        late: seconds of delay that the kernel does not make.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, delay: float, loss: int, rate: str) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            pytest.skip("network namespaces are Linux's and root's")
        if not (shutil.which("ip") and shutil.which("tc")):
            pytest.skip("network namespaces need ip and tc (apt-get install iproute2)")
        self.late = 0.0
        self._delay, self._loss, self._rate = delay, loss, rate
        self._names = [f"flodl{os.getpid()}n{end}" for end in range(2)]
        self._devices = [f"ffv{os.getpid()}n{end}" for end in range(2)]

    def enter(self, end: int) -> None:
        """Move the calling thread, and what it starts, into a namespace for good."""
        with open(f"/run/netns/{self._names[end]}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def __enter__(self) -> Line:
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            pytest.skip(f"no such line can be made here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _make(self) -> None:
        for name in self._names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        (near, far), (device, peer) = self._names, self._devices
        _run("ip", "link", "add", device, "netns", near, "type", "veth", "peer", "name", peer, "netns", far)
        for name, device, address in zip(self._names, self._devices, self.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            # A packet is to be a packet: no big ones that are cut in pieces past the line.
            _run("ip", "-n", name, "link", "set", device, "gso_max_segs", "1", "gso_max_size", str(MTU))
            _run("ip", "-n", name, "link", "set", device, "up")
            self._spoil(name, device)

    def _spoil(self, name: str, device: str) -> None:
        add = ("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root")
        try:
            _run(*add, "netem", "delay", f"{self._delay * 1e3:.0f}ms", "loss", f"{self._loss}%", "rate", self._rate)
        except subprocess.CalledProcessError:
            if shutil.which("nft") is None:
                pytest.skip("this kernel has no netem, and nft is not installed (apt-get install nftables)")
            _run(*add, "tbf", "rate", self._rate, "burst", "16kb", "latency", "400ms")
            drop = f"iif {device} numgen random mod 100 < {self._loss} counter drop"
            for rule in ("table inet line", "chain inet line in { type filter hook input priority 0; }"):
                _run("ip", "netns", "exec", name, "nft", f"add {rule}")
            _run("ip", "netns", "exec", name, "nft", f"add rule inet line in {drop}")
            self.late = self._delay

    def lost(self) -> int:
        """The packets that have been lost so far."""
        total = 0
        for name in self._names:
            for command in (["tc", "-s", "qdisc"], ["nft", "list", "ruleset"]):
                if shutil.which(command[0]):
                    words = _run("ip", "netns", "exec", name, *command).replace(",", "").split()
                    total += sum(int(words[i + 1]) for i, word in enumerate(words[:-1]) if word in _LOST)
        return total


_LOST = ("(dropped", "packets")  # of tc, of nft's counter


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

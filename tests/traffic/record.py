"""Record the traffic in this folder anew: python tests/traffic/record.py, as root, with tcpdump, dumpcap and cargo.

Each file is a small run of the published crate's controller and ranks on loopback, seen by a recorder of packets.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import build, find_cargo

import flodl_fast as ff
from flodl_fast.environment import Environment
from flodl_fast.worker import Worker

HERE = Path(__file__).parent
SALT = bytes(range(16)).hex()
RUN = ("--samples", "192", "--batch", "32", "--max-secs", "60", "--salt", SALT)
TCPDUMP = ("tcpdump", "-q", "-U")


@contextmanager
def recorder(*command):
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    time.sleep(1.5)
    try:
        yield
    finally:
        time.sleep(1.0)
        process.terminate()
        process.wait()


def relayed(binary, epochs):
    """Two hosts with three of the crate's own ranks; stays for some heartbeats where epochs are many."""
    command = [binary, "stack", "--hosts", "0,1;2", "--epochs", str(epochs), *RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as stack:
        first = json.loads(stack.stdout.readline())
        ports = {(r["channel"].lower(), rank): str(r["port"]) for r in first["relays"] for rank in r["ranks"]}
        ranks = [
            subprocess.Popen(
                [binary, "rank", "--data", ports["data", rank], "--control", ports["control", rank], "--rank",
                 str(rank), "--world", "3", "--params", "8", "--salt", SALT],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for rank in range(3)
        ]
        for process in ranks:
            process.wait()
        stack.stdout.read()


def joined(binary):
    """Two of our agents come through the join window, their ranks dial the controller; with a look at its status."""
    command = [binary, "stack", "--join", "--ranks", "2", "--epochs", "1", *RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as stack:
        first = json.loads(stack.stdout.readline())
        address = f"127.0.0.1:{first['controller']}"
        train = [sys.executable, __file__, "rank"]
        agents = []
        for host in "ab":
            agent = [sys.executable, "-m", "flodl_fast", "join", address, "--host", host, "--", *train]
            agents.append(subprocess.Popen(agent))
            time.sleep(0.5)
        subprocess.run([sys.executable, "-c", f"import urllib.request as u; u.urlopen('http://{address}/state.json')"])
        for agent in agents:
            agent.wait()
        stack.stdout.read()


def local():
    """A LocalCluster and two of our ranks as threads, one through the relay's ports, one direct."""

    def rank(environment):
        params = [np.zeros(8, np.float32)]
        with Worker.from_env(params, environment=Environment.read(environment)) as worker:
            for plan in worker.plans():
                for _ in plan.batches(32):
                    time.sleep(0.2)
                    worker.step(loss=0.5)

    with ff.LocalCluster(2, 640, 32, 2, salt=SALT) as cluster:
        routes = ("relay", "direct")
        ranks = [threading.Thread(target=rank, args=(cluster.environment(n, route=routes[n]),)) for n in range(2)]
        for thread in ranks:
            thread.start()
        cluster.wait(60)
        for thread in ranks:
            thread.join()


def train_one():
    params = [np.zeros(8, np.float32)]
    with ff.Worker.from_env(params) as worker:
        for plan in worker.plans():
            for _ in plan.batches(32):
                worker.step(loss=0.5)


def main():
    cargo = find_cargo()
    with recorder("dumpcap", "-q", "-i", "lo", "-f", "tcp", "-w", str(HERE / "local-0.6.pcapng")):
        local()
    for version in ("0.6.0", "0.7.0", "0.8.0"):
        binary = str(build(cargo, version))
        name = version.rpartition(".")[0]
        with recorder("dumpcap", "-q", "-i", "lo", "-f", "tcp", "-w", str(HERE / f"relay-{name}.pcapng")):
            relayed(binary, 1)
    binary = str(build(cargo, "0.6.0"))
    cooked = ("-i", "any", "-y", "LINUX_SLL2", "-w", str(HERE / "join-0.6.pcap"))
    with recorder(*TCPDUMP, *cooked, "tcp and host 127.0.0.1"):
        joined(binary)
    with recorder(*TCPDUMP, "-i", "lo", "-s", "120", "--time-stamp-precision", "nano", "-w",
                  str(HERE / "cut-0.6.pcap"), "tcp"):
        relayed(binary, 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        train_one()
    elif sys.argv[1:] == ["alone"]:
        main()
    else:  # in a network of its own, where nobody else's traffic is
        alone = f"ip link set lo up && exec {sys.executable} {__file__} alone"
        sys.exit(subprocess.run(["unshare", "--net", "sh", "-c", alone]).returncode)

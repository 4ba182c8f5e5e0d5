"""Three processes train a small CNN on scikit-learn's digits and average it over sockets.

pip install 'flodl_fast[torch,demo]' && python examples/torch_digits.py
"""

import os
import subprocess
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import flodl_fast as ff
from flodl_fast.torch import Model

WORLD, BATCH, EPOCHS, HELD_OUT, TARGET = 3, 16, 8, 360, 0.97


def train() -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    data, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = data.float().div(16).reshape(-1, 1, 8, 8)
    held_out, training = np.split(np.random.default_rng(0).permutation(len(labels)), [HELD_OUT])
    first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    net = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with ff.Worker.from_env(Model(net)) as worker:
        for plan in worker.plans():
            order = training[np.random.default_rng(plan.epoch).permutation(len(training))]
            for picks in plan.batches(BATCH):
                batch = order[picks]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                worker.step(loss.item())
            with torch.no_grad():
                found = net.eval()(images[held_out]).argmax(1)
            net.train()
            worker.log("accuracy", (found == labels[held_out]).float().mean().item())


if __name__ == "__main__" and sys.argv[1:] == ["rank"]:
    train()
elif __name__ == "__main__":
    samples = len(load_digits(return_X_y=True)[1]) - HELD_OUT
    with ff.LocalCluster(WORLD, samples, BATCH, EPOCHS) as cluster:
        command = [sys.executable, __file__, "rank"]
        ranks = [subprocess.Popen(command, env={**os.environ, **cluster.environment(r)}) for r in range(WORLD)]
        for epoch in cluster.epochs():
            print(f"epoch {epoch.epoch}: loss {epoch.avg_loss:.4f}, held-out {epoch.scalars['accuracy']:.1%}")
    sys.exit({rank.wait() for rank in ranks} != {0} or cluster.wait().epochs[-1].scalars["accuracy"] < TARGET)

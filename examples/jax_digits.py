"""Three processes train a JAX model on scikit-learn's digits and average it over sockets.

pip install 'flodl_fast[jax,demo]' && python examples/jax_digits.py
"""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import flodl_fast as ff
from flodl_fast.jax import Model

WORLD, BATCH, EPOCHS, HELD_OUT, RATE, TARGET = 3, 16, 15, 360, 0.1, 0.95
SHAPES = [("hidden", (64, 64)), ("out", (64, 10))]


def forward(tree: Any, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ tree["hidden"]["w"] + tree["hidden"]["b"])
    return hidden @ tree["out"]["w"] + tree["out"]["b"]


@jax.jit
def update(tree: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """One step of SGD: the new tree, and the loss before."""
    wanted = jax.nn.one_hot(labels, 10)
    value, gradient = jax.value_and_grad(lambda t: -(jax.nn.log_softmax(forward(t, images)) * wanted).mean() * 10)(tree)
    return jax.tree_util.tree_map(lambda leaf, slope: leaf - RATE * slope, tree, gradient), value


def train() -> None:
    data, labels = load_digits(return_X_y=True)
    images = (data / 16).astype(np.float32)
    held_out, training = np.split(np.random.default_rng(0).permutation(len(labels)), [HELD_OUT])
    normal = np.random.default_rng(0).standard_normal
    model = Model({name: {"w": jnp.float32(normal(s) * (2 / s[0]) ** 0.5), "b": jnp.zeros(s[1])} for name, s in SHAPES})
    with ff.Worker.from_env(model) as worker:
        for plan in worker.plans():
            order = training[np.random.default_rng(plan.epoch).permutation(len(training))]
            for picks in plan.batches(BATCH):
                model.tree, loss = update(model.tree, images[order[picks]], labels[order[picks]])
                worker.step(loss)
            worker.log("accuracy", (forward(model.tree, images[held_out]).argmax(1) == labels[held_out]).mean())


if __name__ == "__main__" and sys.argv[1:] == ["rank"]:
    train()
elif __name__ == "__main__":
    with ff.LocalCluster(WORLD, len(load_digits(return_X_y=True)[1]) - HELD_OUT, BATCH, EPOCHS) as cluster:
        command = [sys.executable, __file__, "rank"]
        ranks = [subprocess.Popen(command, env={**os.environ, **cluster.environment(r)}) for r in range(WORLD)]
        for epoch in cluster.epochs():
            print(f"epoch {epoch.epoch}: loss {epoch.avg_loss:.4f}, held-out {epoch.scalars['accuracy']:.1%}")
    sys.exit({rank.wait() for rank in ranks} != {0} or cluster.wait().epochs[-1].scalars["accuracy"] < TARGET)

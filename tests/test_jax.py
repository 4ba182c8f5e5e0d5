"""JAX pytrees under a worker."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections import namedtuple
from hashlib import sha256

import numpy as np
import pytest
from worker_support import ask_for_an_average, stepped

import flodl_fast as ff

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
import jax.numpy as jnp  # noqa: E402

from flodl_fast import jax as module  # noqa: E402

f32 = np.float32
Layer = namedtuple("Layer", "w b")


@pytest.fixture
def tree():
    return {"layers": [Layer(jnp.arange(6.0).reshape(2, 3), jnp.ones(3)), None], "scale": jnp.float32(2)}


@pytest.fixture
def state():
    return {"mean": jnp.full(2, 3.0), "steps": jnp.int32(5), "name": "running", "half": jnp.ones(2, jnp.bfloat16)}


def leaves(tree):
    return jax.tree_util.tree_leaves(tree)


def values(tree):
    return [np.array(leaf, f32) for leaf in leaves(tree)]


def test_a_tree_is_averaged(coordinator, tree, state):
    """Weights 3 and 1 for the tree, 1 and 1 for the state, in the crate's arithmetic; all else stays as it was."""
    model = module.Model(tree, state)
    before = values(tree)
    others = [a + f32(1) for a in before]
    counts = ff.RoundFrame([np.array([0, 1], f32)], ff.RoundKind.CONTROL)
    with coordinator.serving(model, world=2) as worker:
        stepped(coordinator, worker, 3)
        rounds = [[counts], [ff.RoundFrame(others, weight=1.0)], [ff.RoundFrame([np.full(2, 5, f32)], weight=1.0)]]
        ack, sent = ask_for_an_average(coordinator, worker, rounds)
    assert [t.tobytes() for t in sent[1].tensors] == [(a * f32(3)).tobytes() for a in before]
    assert (sent[1].weight, sent[2].weight) == (3.0, 1.0)
    expected = [(a * f32(3) + b) * f32(0.25) for a, b in zip(before, others, strict=True)]
    assert [a.tobytes() for a in values(model.tree)] == [a.tobytes() for a in expected]
    assert ack.pre_norm == pytest.approx(math.sqrt(sum((a.astype(float) ** 2).sum() for a in before)))
    assert jax.tree_util.tree_structure(model.tree) == jax.tree_util.tree_structure(tree)
    assert model.state["mean"].tolist() == [4, 4]
    assert model.state["name"] == "running"
    assert (model.state["steps"] is state["steps"], model.state["half"] is state["half"]) == (True, True)
    assert values(tree)[0].tolist() == before[0].tolist()  # JAX arrays never change


def test_formation_takes_rank_0s_values(coordinator, tree):
    model = module.Model(tree)
    before = values(tree)
    with coordinator.serving(model, formation=True):
        pass
    assert [a.tobytes() for a in values(model.tree)] == [a.tobytes() for a in before]


def test_an_elastic_blend(tree):
    model = module.Model(tree)
    model.params.adopt([np.full(a.shape, 10, f32) for a in model.params.arrays], alpha=0.5)
    assert model.tree["layers"][0].w.tolist() == [[5, 5.5, 6], [6.5, 7, 7.5]]


def test_nothing_is_copied_on_the_way_out(tree):
    model = module.Model(tree)
    model.params.pull()
    addresses = [array.ctypes.data for array in model.params.arrays]
    assert addresses == [leaf.unsafe_buffer_pointer() for leaf in leaves(tree)]


def test_one_copy_on_the_way_back(monkeypatch, tree):
    """The memory that the average is copied to is the new array's own, wherever its frame had it."""
    model = module.Model(tree)
    taken = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda array, *where: taken.append(array) or put(array, *where))
    frame = np.zeros(4 * 6 + 1, np.uint8)[1:].view(f32).reshape(2, 3)  # unaligned, as wire data is
    model.params.adopt([frame, *model.params.arrays[1:]])
    assert len(taken) == 1  # what is not averaged is not copied
    assert model.tree["layers"][0].w.unsafe_buffer_pointer() == taken[0].ctypes.data
    assert model.tree["scale"] is tree["scale"]


def test_an_average_neither_recompiles_nor_stops_donation(tree):
    model = module.Model(tree)
    train = jax.jit(lambda tree: jax.tree_util.tree_map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    model.tree = train(model.tree)
    for average in (lambda a: a + 1, lambda a: a):  # adopted, and not
        model.params.pull()
        model.params.adopt([average(a) for a in model.params.arrays])
        before = model.tree
        model.tree = train(before)
        assert before["scale"].is_deleted()
    assert train._cache_size() == 1
    assert model.tree["scale"].tolist() == 6.0


def test_half_precision_travels_as_float32_where_asked():
    tree = {"w": jnp.full(3, 1.5, jnp.bfloat16), "v": jnp.full(2, 0.5, jnp.float16)}
    with pytest.raises(TypeError, match=r'parameter v: expected float32, got float16; widen=True takes it'):
        module.Model(tree)
    model = module.Model(tree, widen=True)
    assert [a.dtype for a in model.params.arrays] == [np.float32] * 2
    assert model.params.norm() == pytest.approx(math.sqrt(3 * 2.25 + 2 * 0.25))
    model.params.adopt([np.full(2, 0.1, f32), np.full(3, 1 + 2**-8, f32)])  # a tie goes to even
    assert (model.tree["w"].dtype, model.tree["v"].dtype) == (jnp.bfloat16, jnp.float16)
    assert model.tree["w"].astype(f32).tolist() == [1.0] * 3
    assert model.tree["v"].tolist() == np.full(2, 0.1, np.float16).tolist()


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"a": [np.zeros(2, f32)]}, r"parameter a\.0: expected a JAX array, got ndarray"),
        ({"a": 1.0}, "parameter a: expected a JAX array, got float"),
        ({"a": jnp.int32(1)}, "parameter a: expected float32, got int32$"),
    ],
)
def test_leaves_that_are_refused(tree, error):
    with pytest.raises(TypeError, match=error):
        module.Model(tree)


def test_what_cannot_be_asked(tree):
    model = module.Model(tree, {"mean": jnp.zeros(2)})
    with pytest.raises(TypeError, match="tree: another structure, shape or dtype than before"):
        model.tree = {"w": jnp.zeros(2)}
    with pytest.raises(TypeError, match="state: another structure"):
        model.state = {"mean": jnp.zeros(3)}
    assert model.tree is tree


def test_the_signature_is_of_paths_dtypes_and_shapes(tree, state):
    del state["half"], state["name"]
    entries = [
        (b"P", b"layers.0.w", 6, 2, 3), (b"P", b"layers.0.b", 6, 3), (b"P", b"scale", 6),
        (b"B", b"mean", 6, 2), (b"B", b"steps", 3),
    ]
    plain = b"".join(
        tag + name + b"\0" + struct.pack(f"<iI{len(dims)}q", code, len(dims), *dims)
        for tag, name, code, *dims in entries
    )
    assert module.Model(tree, state).sig == sha256(plain).digest()


def test_leaves_keep_their_devices():
    """On two devices, which XLA makes of one CPU for tests of its own."""

    program = """
import jax, jax.numpy as jnp, numpy as np
from flodl_fast.jax import Model
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
tree = {"far": jax.device_put(jnp.zeros(3), jax.devices()[1]), "split": jax.device_put(jnp.arange(8.0), split)}
model = Model(tree)
model.params.adopt([a + 1 for a in model.params.arrays])
assert all(model.tree[name].sharding == tree[name].sharding for name in tree)
print(model.tree["far"].tolist(), model.tree["split"].tolist())
"""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0, 1.0] [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]"


def test_the_repr(tree, state):
    assert repr(module.Model(tree, state)) == "flodl_fast.jax.Model(3 parameters, 1 buffer, 48 bytes)"

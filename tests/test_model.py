"""Models of plain arrays, and what is said where a framework is missing."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

import flodl_fast as ff
from flodl_fast.model import Model, Tensors

f32 = np.float32


def forget(monkeypatch, name):
    """Let the next use of this framework's module import it anew."""
    monkeypatch.delitem(sys.modules, f"flodl_fast.{name}", raising=False)
    monkeypatch.delattr(ff, name, raising=False)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("torch", r"flodl_fast\.torch needs PyTorch .*: pip install 'flodl_fast\[torch\]'"),
        ("jax", r"flodl_fast\.jax needs JAX .*: pip install 'flodl_fast\[jax\]'"),
        ("cupy", r"CUDA arrays are copied by CuPy .*: install the cupy package of your CUDA"),
    ],
)
def test_a_missing_framework_names_what_to_install(monkeypatch, name, error):
    monkeypatch.setitem(sys.modules, name, None)
    forget(monkeypatch, name)
    with pytest.raises(ImportError, match=error):
        importlib.import_module(f"flodl_fast.{name}")


def test_a_cuda_array_without_cupy(monkeypatch):
    class OnCuda:
        __cuda_array_interface__ = {"version": 3}  # noqa: RUF012

    monkeypatch.setitem(sys.modules, "cupy", None)
    forget(monkeypatch, "cupy")
    with pytest.raises(ImportError, match="install the cupy package"):
        Tensors("params", [OnCuda()])


def test_plain_arrays_are_the_callers_memory():
    mine = [np.ones((2, 3), f32).T, np.zeros((), f32), bytearray(8)]
    tensors = Tensors("params", [*mine[:2], memoryview(mine[2]).cast("f")])
    tensors.pull()
    for array, owner in zip(tensors.arrays, mine, strict=True):
        assert np.shares_memory(array, np.asarray(owner))
    kept = tensors.arrays[1]
    tensors.adopt([np.full((3, 2), 5, f32), kept, np.full(2, 4, f32)], alpha=0.5)
    assert mine[0].tolist() == [[3, 3]] * 3
    assert mine[1] == 0
    assert np.frombuffer(mine[2], f32).tolist() == [2, 2]
    assert (len(tensors), tensors.nbytes) == (3, 36)
    assert tensors.norm() == pytest.approx(np.sqrt(6 * 9 + 2 * 4))


def test_what_has_no_signature_is_a_model_that_tells_none():
    weights, mask = {"w": np.ones(2, f32)}, {"mask": np.ones((2, 2), bool)}
    with pytest.raises(TypeError, match="mask: flodl has no code for dtype bool"):
        ff.model_sig(weights, mask)
    model = Model.of(weights, mask)
    assert (len(model.params), len(model.buffers)) == (1, 0)
    for _ in range(2):
        with pytest.raises(TypeError, match="mask: flodl has no code for dtype bool"):
            _ = model.sig
    exported = Model.of({"w": memoryview(bytearray(8)).cast("f")}, {"b": memoryview(bytearray(4)).cast("f")})
    assert (len(exported.params), len(exported.buffers)) == (1, 1)
    with pytest.raises(TypeError, match="buffers: tensor 0: list gives no memory"):
        Model.of([np.ones(2, f32)], {"b": [1.0]})
    with pytest.raises(ff.EncodeError, match=r"'\\ud800' holds a lone surrogate"):
        ff.model_sig({"\ud800": np.ones(2, f32)})


FLAT = np.zeros((4, 6), f32)


@pytest.mark.parametrize(("params", "buffers", "error"), [
    ([FLAT, FLAT], [], "params: tensor 0 and params: tensor 1 share memory, which would be averaged twice"),
    ({"a": np.zeros(3, f32), "b": FLAT, "tied": FLAT}, {}, "params: tensor 1 and params: tensor 2 share"),
    ([FLAT[0], FLAT[2:], np.zeros(2, f32), FLAT[:2, 5]], [], "params: tensor 0 and params: tensor 3 share"),
    ([FLAT[:, ::-2], FLAT.T[3]], [], "params: tensor 0 and params: tensor 1 share"),
    ([FLAT], {"running": FLAT[1]}, "params: tensor 0 and buffers: tensor 0 share"),
    ([memoryview(FLAT), FLAT[3, 5:]], [], "params: tensor 0 and params: tensor 1 share"),
])
def test_memory_is_given_once(params, buffers, error):
    with pytest.raises(ValueError, match=error):
        Model.of(params, buffers)


def test_parts_of_one_block_are_apart():
    columns = [*np.split(FLAT, 3, axis=1)[:2], FLAT[::2, 4], FLAT[1::2, 4][::-1], FLAT[:, 5], FLAT[:0], FLAT[:0]]
    assert len(Model.of(columns, []).params) == 7


def test_the_repr():
    model = Model.of([np.zeros(3, f32)], [])
    assert repr(model) == "flodl_fast.model.Model(1 parameter, 0 buffers, 12 bytes)"
    assert Model.of(model, ()) is model

"""CUDA arrays of other libraries than PyTorch: by CuPy where there is a GPU, else by its stand-in."""

from __future__ import annotations

import importlib
import sys
import types
from contextlib import nullcontext

import cuda_stand_in as stand_in
import numpy as np
import pytest
from test_model import forget

from flodl_fast.model import Tensors

f32 = np.float32


def on_gpu():
    """Whether CuPy is here and finds a device."""
    try:
        cupy = importlib.import_module("cupy")
        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # of any kind, where driver or libraries are missing
        return False


class Array:
    """As much of a CuPy array as copies need; with a base, a view of it that is not contiguous."""

    device = types.SimpleNamespace(id=0)

    def __init__(self, values):
        self.values = values
        self.flags = types.SimpleNamespace(c_contiguous=values.flags.c_contiguous)
        for name in ("dtype", "shape", "size", "nbytes"):
            setattr(self, name, getattr(values, name))

    def get(self, stream, out, blocking):
        assert not blocking
        assert out.flags.c_contiguous
        stream.give("get", lambda: np.copyto(out, self.values))

    def set(self, values, stream):
        assert self.flags.c_contiguous
        stream.give("set", lambda: np.copyto(self.values, values))

    def __setitem__(self, key, other):
        stand_in.Stream.current.give("assign", lambda: self.values.__setitem__(key, other.values))

    def add(self, value):
        stand_in.Stream.current.give("add", lambda: np.add(self.values, f32(value), out=self.values))


class Interface(Array):
    """What numba and others have."""

    @property
    def __cuda_array_interface__(self):
        return {"version": 3, "shape": self.shape}


class Exporter(Array):
    """What is only known by DLPack, on CUDA's own or its managed memory."""

    def __init__(self, values, device):
        super().__init__(values)
        self.kind = device

    def __dlpack_device__(self):
        return self.kind, 0


@pytest.fixture
def caller(monkeypatch):
    """The stand-in in the place of CuPy; pinned memory begins as NaN."""

    def pin(size):
        stand_in.CALLS.append(("host", "pin"))
        return bytearray(np.full(size // 4 or 1, np.nan, f32).tobytes())

    cuda = types.SimpleNamespace(
        Stream=stand_in.Stream,
        Device=nullcontext,
        get_current_stream=lambda device: stand_in.Stream.current,
        alloc_pinned_memory=pin,
    )
    fake = types.ModuleType("cupy")
    fake.__dict__.update(
        cuda=cuda,
        asarray=lambda tensor: Array(tensor.values),
        from_dlpack=lambda tensor: Array(tensor.values),
        empty=lambda shape, dtype: Array(np.empty(shape, dtype)),
        square=lambda array: np.square(array.values),
    )
    forget(monkeypatch, "cupy")
    monkeypatch.setitem(sys.modules, "cupy", fake)
    yield stand_in.restart()
    forget(monkeypatch, "cupy")


def ones(*shape):
    return np.ones(shape, f32)


@pytest.mark.parametrize(
    "make", [Interface, lambda v: Exporter(v, 2), lambda v: Exporter(v, 13)], ids=["interface", "dlpack", "managed"]
)
def test_order_of_copies_and_kernels(caller, make):
    mine = [make(ones(2, 3)), make(ones(4, 2).T), make(ones())]

    def read(array):
        caller.finish()
        return array.values

    tensors = Tensors("params", mine)
    assert tensors.norm() == pytest.approx(np.sqrt(6 + 8 + 1))
    stand_in.check(tensors, mine, lambda array: array.add(1), read)
    assert stand_in.CALLS.count(("host", "pin")) == 3  # once each, whatever the number of averages


def test_an_array_without_values(caller):
    tensors = Tensors("params", [Interface(ones(0, 3))])
    tensors.pull()
    assert [array.shape for array in tensors.arrays] == [(0, 3)]


def test_other_dtypes_are_refused(caller):
    with pytest.raises(TypeError, match="params: tensor 1: expected float32, got float64"):
        Tensors("params", [ones(2), Interface(np.zeros(3))])


@pytest.mark.skipif(not on_gpu(), reason="no CuPy with a CUDA device; the stand-in's tests run instead")
def test_cupy_on_a_gpu():
    import cupy

    mine = [cupy.ones((2, 3), f32), cupy.ones((4, 2), f32).T]
    tensors = Tensors("params", mine)
    assert tensors.norm() == pytest.approx(np.sqrt(14))
    stand_in.check(tensors, mine, lambda array: array.__iadd__(1), cupy.asnumpy)

"""JAX pytrees as models of a worker (docs/frameworks.md)."""
# Where JAX is not installed pyright takes this file for it.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise ImportError(f"flodl_fast.jax needs JAX ({error}): pip install 'flodl_fast[jax]'") from error

from . import model
from .model import Arrays, Tensors, blend
from .signature import sig_or_why

__all__ = ["Model"]

_HALF = (jnp.float16, jnp.bfloat16)
_LINE = 64  # bytes to which XLA aligns its buffers: host memory aligned so becomes one without a copy


class Model(model.Model):
    """A pytree of parameters, and one of state that is averaged beside them.

    JAX arrays never change, so an average comes as new ones: take ``tree`` (and ``state``) anew for each step, and set
    them after it, to others of the same structure, shapes and dtypes. On the CPU nothing is copied on the way out, and
    once on the way back. The new arrays have the dtype, the sharding and the device of those that they replace.

    Args:
        tree: any pytree whose leaves are float32 JAX arrays.
        state: any pytree; its float32 leaves are averaged as buffers, all others stay local.
        widen: take parameters of half precision, too: float16 and bfloat16 are widened to float32 on the way out, which
            is exact, and averages rounded on the way back.

    Attributes:
        tree: yours to replace by another of the same structure, shapes and dtypes.
        state: likewise.

    Raises:
        TypeError: a leaf of ``tree`` that is no JAX array, not float32, nor of half precision under ``widen``.
    """

    def __init__(self, tree: Any, state: Any = None, *, widen: bool = False) -> None:
        params, buffers = _named(tree), [(name, leaf) for name, leaf in _named(state) if isinstance(leaf, jax.Array)]
        for name, leaf in params:
            if not isinstance(leaf, jax.Array):
                raise TypeError(f"parameter {name}: expected a JAX array, got {type(leaf).__name__}")
            if leaf.dtype != jnp.float32 and not (widen and leaf.dtype in _HALF):
                hint = "; widen=True takes it" if leaf.dtype in _HALF else ""
                raise TypeError(f"parameter {name}: expected float32, got {leaf.dtype}{hint}")
        self._tree = _Leaves("tree", tree, (jnp.float32, *(_HALF if widen else ())))
        self._state = _Leaves("state", state, (jnp.float32,))
        super().__init__(self._tree, self._state, sig_or_why(params, buffers))

    @property
    def tree(self) -> Any:
        """The pytree of parameters as it is now."""
        return self._tree.tree

    @tree.setter
    def tree(self, tree: Any) -> None:
        self._tree.tree = tree

    @property
    def state(self) -> Any:
        """The pytree of buffers as it is now."""
        return self._state.tree

    @state.setter
    def state(self, state: Any) -> None:
        self._state.tree = state


def _named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths, keys joined by dots as PyTorch does."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


class _Leaves(Tensors):
    """The leaves of a pytree that are averaged.

    Args:
        what: what to call the pytree in an error.
        tree: the pytree.
        dtypes: those of the leaves to average; others stay local.
    """

    def __init__(self, what: str, tree: Any, dtypes: Sequence[Any]) -> None:
        self._what = what
        self._dtypes = dtypes
        self._tree = tree
        self._specs = self._spec(tree)
        self._views: Arrays | None = None

    @property
    def tree(self) -> Any:
        return self._tree

    @tree.setter
    def tree(self, tree: Any) -> None:
        specs = self._spec(tree)
        if specs != self._specs:
            raise TypeError(f"{self._what}: another structure, shape or dtype than before")
        self._tree = tree
        self._views = None

    def _spec(self, tree: Any) -> Any:
        """What must stay as it is."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        return structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else None for leaf in leaves]

    def _averaged(self, leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and leaf.dtype in self._dtypes

    def _leaves(self) -> list[Any]:
        return [leaf for leaf in jax.tree_util.tree_leaves(self._tree) if self._averaged(leaf)]

    @property
    def arrays(self) -> Arrays:
        if self._views is None:
            self._views = tuple(np.asarray(leaf).astype(np.float32, copy=False) for leaf in self._leaves())
        return self._views

    def __len__(self) -> int:
        return len(self._leaves())

    @property
    def nbytes(self) -> int:
        return int(4 * sum(leaf.size for leaf in self._leaves()))

    def pull(self) -> None:
        for leaf in self._leaves():
            leaf.copy_to_host_async()

    def adopt(self, averages: Sequence[np.ndarray], alpha: float | None = None) -> None:
        leaves, structure = jax.tree_util.tree_flatten(self._tree)
        values = zip(self.arrays, averages, strict=True)
        for i, leaf in enumerate(leaves):
            if self._averaged(leaf):
                array, average = next(values)
                if average is not array:
                    leaves[i] = _like(leaf, blend(array, average, alpha))
        self._tree = jax.tree_util.tree_unflatten(structure, leaves)
        self._views = None  # A view would keep the caller from donating what it looks at.

    def norm(self) -> float:
        parts = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in self._leaves()]
        return math.sqrt(sum(map(float, parts)))


def _like(leaf: jax.Array, values: np.ndarray) -> jax.Array:
    """A new array of these values, where and as the leaf is."""
    size = leaf.dtype.itemsize * leaf.size
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    aligned = memory[start : start + size].view(leaf.dtype).reshape(leaf.shape)
    np.copyto(aligned, values, casting="same_kind")
    return jax.device_put(aligned, leaf.sharding if leaf.committed else None)

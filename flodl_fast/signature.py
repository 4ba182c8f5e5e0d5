"""The signature of a model, by which the ranks of a 0.8 cluster know that they train the same one (docs/wire.md §7)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import EncodeError
from .protocol import Revision

__all__ = ["dtype_name", "model_sig", "sig_or_why", "told_signatures"]

SIZE = 32

# The crate's codes of element types, by the name that NumPy, PyTorch and JAX all give them.
_CODES = {"int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7, "bfloat16": 15}

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]


def model_sig(parameters: Named, buffers: Named = ()) -> bytes:
    """The 32-byte signature of a model: its names, element types and shapes, but no values (docs/wire.md §7).

    Args:
        parameters: the named parameters in the order of their declaration, as a mapping or as (name, array) pairs;
            anything with ``dtype`` and ``shape`` is an array, tensors of PyTorch and JAX included.
        buffers: the named buffers, likewise.

    Raises:
        TypeError: a name that is no text, something without dtype and shape, or a dtype that flodl has no code for.
        EncodeError: a name with a lone surrogate.
    """
    digest = hashlib.sha256()
    for tag, named in ((b"P", parameters), (b"B", buffers)):
        for pair in named.items() if isinstance(named, Mapping) else named:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"expected names with their arrays, a mapping or pairs, got one {type(pair).__name__}")
            name, array = pair
            if not isinstance(name, str):
                raise TypeError(f"expected the name of a parameter or buffer, got {type(name).__name__}")
            try:
                dtype, shape = dtype_name(array), tuple(array.shape)
            except AttributeError:
                raise TypeError(f"{name}: a {type(array).__name__} has no dtype and shape") from None
            if dtype not in _CODES:
                raise TypeError(f"{name}: flodl has no code for dtype {dtype}, it has {', '.join(_CODES)}")
            try:
                text = name.encode()
            except UnicodeEncodeError:
                raise EncodeError(f"{name!a} holds a lone surrogate, which UTF-8 cannot carry") from None
            digest.update(tag + text + b"\0")
            digest.update(struct.pack(f"<iI{len(shape)}q", _CODES[dtype], len(shape), *shape))
    return digest.digest()


def sig_or_why(parameters: Named, buffers: Named = ()) -> bytes | TypeError | EncodeError:
    """The ``model_sig``, or the error in its place: what has no signature can be trained where none is told."""
    try:
        return model_sig(parameters, buffers)
    except (TypeError, EncodeError) as error:
        return error.with_traceback(None)


def dtype_name(array: Any) -> str:
    """The name of an array's dtype, whichever library's it is.

    Raises:
        AttributeError: it has none.
    """
    dtype = array.dtype
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def told_signatures(revision: Revision, model_sig: bytes | None) -> list[bytes]:
    """What a rank's control handshake tells of its model: the signature from 0.8 on, nothing before (docs/wire.md §9).

    Raises:
        EncodeError: a signature that the revision does not have, or has and is not given, or of another size.
    """
    if model_sig is None and revision < Revision.V0_8:
        return []
    if model_sig is None or revision < Revision.V0_8 or len(model_sig) != SIZE:
        wanted = "no model_sig" if revision < Revision.V0_8 else f"a model_sig of {SIZE} bytes"
        given = "none" if model_sig is None else f"one of {len(model_sig)} bytes"
        raise EncodeError(f"a control handshake of revision {revision.value} has {wanted}, {given} is given")
    return [bytes(model_sig)]

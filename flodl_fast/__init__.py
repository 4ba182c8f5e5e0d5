"""flodl's wire for Python: messages, frames and averaged parameters, byte-exact with the published crate."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

try:
    from . import _codec, _round  # noqa: F401
except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "numpy":
        import sys as _sys

        raise ImportError(
            f"flodl_fast needs NumPy, and {_sys.executable} has none: run the Python that flodl_fast was installed "
            "for (after `make` that is .venv/bin/python), or install it for this one"
        ) from error
    raise ImportError(
        f"flodl_fast's compiled modules cannot be loaded from {__path__[0]} ({error}); in a checkout, whose folder "
        "comes before an installed flodl_fast, build them with `make build` or `pip install -e .`"
    ) from error

from . import errors as _errors
from . import messages as _messages
from .convert import (
    control_wire_to_msg,
    epoch_metrics_from_wire,
    epoch_metrics_to_wire,
    metrics_msg_to_wire,
    timing_msg_to_wire,
)
from .errors import *  # noqa: F403
from .frames import Codec, MuxRecord
from .jsonform import from_json, to_json
from .messages import *  # noqa: F403
from .protocol import MsgKind, MuxKind, Revision, RoundKind
from .rounds import (
    Elided,
    RoundFold,
    RoundFrame,
    TensorLayout,
    frame_ceiling,
    gamma_mass,
    is_realized,
    mover_mass,
    reduce_frames,
    sum_frames,
)
from .signature import model_sig
from .stream import FrameReader, FrameWriter

if _TYPE_CHECKING:
    from . import aio
    from .channel import ControlChannel, DataChannel
    from .environment import Environment
    from .local import LocalCluster
    from .worker import Plan, Worker

    __version__: str

__all__ = [
    "Codec",
    "ControlChannel",
    "DataChannel",
    "Elided",
    "Environment",
    "FrameReader",
    "FrameWriter",
    "LocalCluster",
    "MsgKind",
    "MuxKind",
    "MuxRecord",
    "Plan",
    "Revision",
    "RoundFold",
    "RoundFrame",
    "RoundKind",
    "TensorLayout",
    "Worker",
    "aio",
    "control_wire_to_msg",
    "epoch_metrics_from_wire",
    "epoch_metrics_to_wire",
    "frame_ceiling",
    "from_json",
    "gamma_mass",
    "is_realized",
    "metrics_msg_to_wire",
    "model_sig",
    "mover_mass",
    "reduce_frames",
    "sum_frames",
    "timing_msg_to_wire",
    "to_json",
]
__all__ += _errors.__all__
__all__ += _messages.__all__


# What lives on sockets takes as long to import as all the rest, and a tool that reads bytes does without.
_LIVE = {
    "ControlChannel": "channel",
    "DataChannel": "channel",
    "Environment": "environment",
    "LocalCluster": "local",
    "Plan": "worker",
    "Worker": "worker",
}


def __getattr__(name: str) -> _Any:
    if name == "aio":
        return _importlib.import_module(".aio", __name__)
    if name in _LIVE:
        return getattr(_importlib.import_module(f".{_LIVE[name]}", __name__), name)
    if name == "__version__":
        return _importlib.import_module("importlib.metadata").version("flodl_fast")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

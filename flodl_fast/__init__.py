"""flodl's wire for Python: messages, frames and averaged parameters, byte-exact with the published crate."""

from importlib.metadata import version as _version

try:
    from . import _codec, _round  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"flodl_fast's compiled modules are missing ({error}); build them with `pip install .` in a checkout, "
        "which needs a C compiler and Python's headers"
    ) from error

from . import aio
from . import errors as _errors
from . import messages as _messages
from .channel import ControlChannel, DataChannel
from .convert import (
    control_wire_to_msg,
    epoch_metrics_from_wire,
    epoch_metrics_to_wire,
    metrics_msg_to_wire,
    timing_msg_to_wire,
)
from .environment import Environment
from .errors import *  # noqa: F403
from .frames import Codec, MuxRecord
from .jsonform import from_json, to_json
from .local import LocalCluster
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
from .worker import Plan, Worker

__version__ = _version("flodl_fast")

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

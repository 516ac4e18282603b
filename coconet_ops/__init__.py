"""Fused compute-communication primitives for PyTorch."""

import torch  # noqa: F401  first: the extension links against its libraries

from . import (
    _meta,  # noqa: F401  registers the fake kernels
    optim,
    reference,
)
from ._build_info import build_info
from .collectives import all_gather, all_reduce, all_reduce_, copy_to_group, reduce_scatter
from .communicator import Communicator, communicator
from .errors import CommunicatorError, CommunicatorTimeout, MismatchError, PeerLostError
from .local import LocalCommunicator
from .rs_adam_ag import AdamState, rs_adam_ag_

__version__ = "0.1.0"


__all__ = [
    "AdamState",
    "Communicator",
    "CommunicatorError",
    "CommunicatorTimeout",
    "LocalCommunicator",
    "MismatchError",
    "PeerLostError",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "build_info",
    "communicator",
    "copy_to_group",
    "optim",
    "reduce_scatter",
    "reference",
    "rs_adam_ag_",
]

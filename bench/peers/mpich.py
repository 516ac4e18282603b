"""MPICH."""

from ._mpi import Mpi

PEER = Mpi(
    "mpich",
    options=["-bind-to", "none"],
    environment={},
    yielding={"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
).peer

"""Open MPI."""

from ._mpi import Mpi

PEER = Mpi(
    "openmpi",
    options=["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"],
    environment={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    yielding={"OMPI_MCA_mpi_yield_when_idle": "1"},
).peer

"""Intel MPI."""

from ._mpi import Mpi

PEER = Mpi(
    "impi",
    options=[],
    environment={"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"},
    yielding={"I_MPI_THREAD_YIELD": "2", "I_MPI_WAIT_MODE": "1"},
).peer

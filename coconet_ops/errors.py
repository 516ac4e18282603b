"""Errors of the communicator. Bad input raises TypeError or ValueError instead, and full memory
MemoryError."""


class CommunicatorError(RuntimeError):
    """The communicator is closed or has failed; the message repeats the first cause."""


class PeerLostError(CommunicatorError):
    """A peer died, exited, closed its communicator or was interrupted. The communicator is closed
    for good."""


class CommunicatorTimeout(CommunicatorError):
    """A peer didn't arrive within the timeout. The communicator is closed for good."""


class MismatchError(CommunicatorError):
    """The ranks disagree about a call, or one of them was given bad arguments. Raised on every
    rank before anything is written; the communicator stays usable."""

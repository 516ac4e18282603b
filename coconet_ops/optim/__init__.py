"""Optimizers whose state is sharded over the ranks."""

from .distributed_fused_adam import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]

"""Meshes, process groups, parallelization and layout-independent initial weights."""

from torchtitan.distributed.initialize import initialize_weights
from torchtitan.distributed.parallel_dims import ParallelDims

__all__ = ["ParallelDims", "initialize_weights"]

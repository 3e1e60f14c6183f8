"""Dry runs jobs of any size on one machine: each rank's memory, communication and computation in a
step."""

from torchtitan.dry_run.report import dry_run

__all__ = ["dry_run"]

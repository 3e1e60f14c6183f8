"""Dry run of a job of any size on one machine: memory, communication and computation of each rank in a step."""

from torchtitan.dry_run.report import dry_run

__all__ = ["dry_run"]

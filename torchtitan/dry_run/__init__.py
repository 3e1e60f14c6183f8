"""A run of any size, tried without a cluster: what each rank would hold, communicate and compute in one step."""

from torchtitan.dry_run.report import dry_run

__all__ = ["dry_run"]

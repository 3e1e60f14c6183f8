"""Foresight: the time, memory and best layout of a run, before it starts."""

from torchtitan.foresight.planning import plan
from torchtitan.foresight.prediction import predict

__all__ = ["plan", "predict"]

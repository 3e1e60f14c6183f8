"""Configuration: `Configurable`, the shared job sections, and `ConfigManager`, which reads the command line."""

from torchtitan.config.configurable import Configurable
from torchtitan.config.job_config import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.manager import ConfigManager

__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "ConfigManager",
    "Configurable",
    "DebugConfig",
    "ParallelismConfig",
    "TrainingConfig",
]

"""Configuration: `Configurable`, the sections that every run has, and the command-line reader
`ConfigManager`."""

from torchtitan.config.configurable import Configurable
from torchtitan.config.manager import ConfigManager
from torchtitan.config.sections import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)

__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "ConfigManager",
    "Configurable",
    "DebugConfig",
]
__all__ += ["ParallelismConfig", "TrainingConfig"]

"""Configuration: `Configurable`, the shared job sections, and `ConfigManager`, which reads the command line."""

from torchtitan.config.configurable import Configurable
from torchtitan.config.job_config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig

__all__ = ["CommConfig", "Configurable", "DebugConfig", "ParallelismConfig", "TrainingConfig"]

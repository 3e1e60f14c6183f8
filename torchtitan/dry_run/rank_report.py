"""What a dry run finds out about one rank."""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist

from torchtitan.config.configurable import to_plain
from torchtitan.distributed import ParallelDims
from torchtitan.dry_run.fake_trainer import FakeTrainer, fake_trainer
from torchtitan.tools.caching_allocator import peak_reserved
from torchtitan.tools.memory_tracker import MemoryKind
from torchtitan.trainer import Trainer

"""Training configurations of SmolLM3: `--module smollm3 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.smollm3 import FAMILY

smollm3_debugmodel = small(FAMILY, "debugmodel")
smollm3_3b = published(FAMILY, "3B", "SmolLM3-3B-Base", lr=4e-4, local_batch_size=2)

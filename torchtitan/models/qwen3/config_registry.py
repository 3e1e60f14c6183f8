"""Training configurations of Qwen3: `--module qwen3 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.qwen3 import FAMILY

qwen3_debugmodel = small(FAMILY, "debugmodel")
qwen3_600m = published(FAMILY, "0.6B", "Qwen3-0.6B", lr=4e-4, local_batch_size=4)
qwen3_4b = published(FAMILY, "4B", "Qwen3-4B", lr=4e-4, local_batch_size=2)
qwen3_8b = published(FAMILY, "8B", "Qwen3-8B", lr=3e-4, local_batch_size=2)
qwen3_32b = published(FAMILY, "32B", "Qwen3-32B", lr=1.5e-4, local_batch_size=1)

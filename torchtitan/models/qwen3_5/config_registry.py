"""Training configurations of Qwen3.5: `--module qwen3_5 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.qwen3_5 import FAMILY

qwen3_5_debugmodel = small(FAMILY, "debugmodel")
qwen3_5_moe_debugmodel = small(FAMILY, "moe-debugmodel")
qwen3_5_800m = published(FAMILY, "0.8B", "Qwen3.5-0.8B", lr=4e-4, local_batch_size=4)
qwen3_5_4b = published(FAMILY, "4B", "Qwen3.5-4B", lr=4e-4, local_batch_size=2)
qwen3_5_9b = published(FAMILY, "9B", "Qwen3.5-9B", lr=3e-4, local_batch_size=2)

"""Training configurations of Qwen3 with experts: `--module qwen3_moe --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.qwen3_moe import FAMILY

qwen3_moe_debugmodel = small(FAMILY, "debugmodel")
qwen2_moe_debugmodel = small(FAMILY, "2-debugmodel")
qwen3_moe_30b = published(FAMILY, "30B-A3B", "Qwen3-30B-A3B", lr=3e-4, local_batch_size=1)

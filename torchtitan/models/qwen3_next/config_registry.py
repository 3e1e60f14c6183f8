"""Training configurations of Qwen3-Next: `--module qwen3_next --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.qwen3_next import FAMILY

qwen3_next_debugmodel = small(FAMILY, "debugmodel")
qwen3_next_80b = published(
    FAMILY, "80B-A3B", "Qwen3-Next-80B-A3B-Instruct", lr=3e-4, local_batch_size=1
)

"""Training configurations of Qwen2 and Qwen2.5: `--module qwen2 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.qwen2 import FAMILY

qwen2_debugmodel = small(FAMILY, "debugmodel")
qwen2_500m = published(FAMILY, "2.5-0.5B", "Qwen2.5-0.5B", lr=4e-4, local_batch_size=4)
qwen2_7b = published(FAMILY, "2.5-7B", "Qwen2.5-7B", lr=3e-4, local_batch_size=2)

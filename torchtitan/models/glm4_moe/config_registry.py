"""Training configurations of GLM-4.5: `--module glm4_moe --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.glm4_moe import FAMILY

glm4_moe_debugmodel = small(FAMILY, "debugmodel")
glm4_moe_106b = published(FAMILY, "4.5-Air-106B", "GLM-4.5-Air", lr=2e-4, local_batch_size=1)

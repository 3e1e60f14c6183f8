"""Training configurations of GLM-4: `--module glm4 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.glm4 import FAMILY

glm4_debugmodel = small(FAMILY, "debugmodel")
glm4_9b = published(FAMILY, "9B-0414", "GLM-4-9B-0414", lr=3e-4, local_batch_size=2)
glm4_32b = published(FAMILY, "32B-0414", "GLM-4-32B-0414", lr=1.5e-4, local_batch_size=1)

"""Training configurations of Gemma 4: `--module gemma4 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.gemma4 import FAMILY

gemma4_debugmodel = small(FAMILY, "debugmodel")
gemma4_12b = published(FAMILY, "12B", "gemma-4-12B", lr=3e-4, local_batch_size=2)

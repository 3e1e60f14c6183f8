"""Training configurations of Gemma 4: `--module gemma4 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.gemma4 import FAMILY

gemma4_debugmodel = small(FAMILY, "debugmodel")
gemma4_small_debugmodel = small(FAMILY, "small-debugmodel")
gemma4_moe_debugmodel = small(FAMILY, "moe-debugmodel")
gemma4_e2b = published(FAMILY, "E2B", "gemma-4-E2B", lr=3e-4, local_batch_size=4)
gemma4_e4b = published(FAMILY, "E4B", "gemma-4-E4B", lr=3e-4, local_batch_size=4)
gemma4_12b = published(FAMILY, "12B", "gemma-4-12B", lr=3e-4, local_batch_size=2)
gemma4_26b = published(FAMILY, "26B-A4B", "gemma-4-26B-A4B", lr=3e-4, local_batch_size=1)

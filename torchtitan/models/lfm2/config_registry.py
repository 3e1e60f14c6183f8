"""Training configurations of LFM2: `--module lfm2 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.lfm2 import FAMILY

lfm2_debugmodel = small(FAMILY, "debugmodel")
lfm2_moe_debugmodel = small(FAMILY, "moe-debugmodel")
lfm2_350m = published(FAMILY, "350M", "LFM2-350M", lr=4e-4, local_batch_size=8)
lfm2_1_2b = published(FAMILY, "1.2B", "LFM2-1.2B", lr=4e-4, local_batch_size=4)
lfm2_8b_a1b = published(FAMILY, "8B-A1B", "LFM2-8B-A1B", lr=3e-4, local_batch_size=2)

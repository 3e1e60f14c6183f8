"""Training configurations of ERNIE 4.5: `--module ernie4_5 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.ernie4_5 import FAMILY

ernie4_5_debugmodel = small(FAMILY, "debugmodel")
ernie4_5_moe_debugmodel = small(FAMILY, "moe-debugmodel")
ernie4_5_300m = published(FAMILY, "0.3B", "ERNIE-4.5-0.3B-Base-PT", lr=4e-4, local_batch_size=8)
ernie4_5_21b = published(
    FAMILY, "21B-A3B", "ERNIE-4.5-21B-A3B-Base-PT", lr=3e-4, local_batch_size=1
)

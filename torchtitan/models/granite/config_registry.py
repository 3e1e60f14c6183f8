"""Training configurations of Granite: `--module granite --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.granite import FAMILY

granite_debugmodel = small(FAMILY, "debugmodel")
granite_hybrid_debugmodel = small(FAMILY, "hybrid-debugmodel")
granite_moe_debugmodel = small(FAMILY, "moe-debugmodel")
granite_2b = published(FAMILY, "3.3-2B", "granite-3.3-2b-base", lr=4e-4, local_batch_size=4)
granite_3b = published(FAMILY, "4.0-micro", "granite-4.0-micro-base", lr=4e-4, local_batch_size=2)
granite_8b = published(FAMILY, "3.3-8B", "granite-3.3-8b-base", lr=3e-4, local_batch_size=2)
granite_h_7b = published(
    FAMILY, "4.0-H-tiny", "granite-4.0-h-tiny-base", lr=3e-4, local_batch_size=2
)

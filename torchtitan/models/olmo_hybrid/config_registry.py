"""Training configurations of OLMo Hybrid: `--module olmo_hybrid --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.olmo_hybrid import FAMILY

olmo_hybrid_debugmodel = small(FAMILY, "debugmodel")
olmo_hybrid_7b = published(FAMILY, "7B", "Olmo-Hybrid-7B", lr=3e-4, local_batch_size=2)

"""Training configurations of Mixtral: `--module mixtral --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.mixtral import FAMILY

mixtral_debugmodel = small(FAMILY, "debugmodel")
mixtral_8x7b = published(FAMILY, "8x7B", "Mixtral-8x7B-v0.1", lr=1.5e-4, local_batch_size=1)

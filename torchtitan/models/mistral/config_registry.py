"""Training configurations of Mistral: `--module mistral --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.mistral import FAMILY

mistral_debugmodel = small(FAMILY, "debugmodel")
mistral_7b = published(FAMILY, "7B-v0.3", "Mistral-7B-v0.3", lr=3e-4, local_batch_size=2)

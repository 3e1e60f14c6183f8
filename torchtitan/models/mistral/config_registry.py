"""Training configurations of Mistral: `--module mistral --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.mistral import FAMILY

mistral_debugmodel = small(FAMILY, "debugmodel")
mistral_7b = published(FAMILY, "7B-v0.3", "Mistral-7B-v0.3", lr=3e-4, local_batch_size=2)
ministral3_debugmodel = small(FAMILY, "3-debugmodel")
ministral3_8b = published(FAMILY, "3-8B", "Ministral-3-8B-Base-2512", lr=3e-4, local_batch_size=2)

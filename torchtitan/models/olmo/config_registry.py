"""Training configurations of OLMo 2 and 3: `--module olmo --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.olmo import FAMILY

olmo_debugmodel = small(FAMILY, "debugmodel")
olmo_1b = published(FAMILY, "2-1B", "OLMo-2-0425-1B", lr=4e-4, local_batch_size=8, seq_len=4096)
olmo_7b = published(FAMILY, "3-7B", "Olmo-3-1025-7B", lr=3e-4, local_batch_size=2)
olmo_32b = published(FAMILY, "3-32B", "Olmo-3-1125-32B", lr=1.5e-4, local_batch_size=1)

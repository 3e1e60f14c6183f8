"""Training configurations of EXAONE: `--module exaone --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.exaone import FAMILY

exaone_debugmodel = small(FAMILY, "debugmodel")
exaone_moe_debugmodel = small(FAMILY, "moe-debugmodel")
exaone_1b = published(FAMILY, "4.0-1.2B", "EXAONE-4.0-1.2B", lr=4e-4, local_batch_size=4)
exaone_32b = published(FAMILY, "4.0-32B", "EXAONE-4.0-32B", lr=1.5e-4, local_batch_size=1)
exaone_236b = published(FAMILY, "K-236B-A23B", "K-EXAONE-236B-A23B", lr=2e-4, local_batch_size=1)

"""Training configurations of Seed-OSS: `--module seed_oss --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.seed_oss import FAMILY

seed_oss_debugmodel = small(FAMILY, "debugmodel")
seed_oss_36b = published(FAMILY, "36B", "Seed-OSS-36B-Base", lr=1.5e-4, local_batch_size=1)

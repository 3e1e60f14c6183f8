"""Training configurations of MiniMax-M2: `--module minimax_m2 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.minimax_m2 import FAMILY

minimax_m2_debugmodel = small(FAMILY, "debugmodel")
minimax_m2_229b = published(FAMILY, "229B-A10B", "MiniMax-M2", lr=2e-4, local_batch_size=1)

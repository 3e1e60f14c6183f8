"""Training configurations of Phi-3 and Phi-4: `--module phi3 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.phi3 import FAMILY

phi3_debugmodel = small(FAMILY, "debugmodel")
phi3_mini = published(
    FAMILY, "3-mini-4k", "Phi-3-mini-4k-instruct", lr=4e-4, local_batch_size=2, seq_len=4096
)
phi3_4 = published(FAMILY, "4", "phi-4", lr=3e-4, local_batch_size=1)

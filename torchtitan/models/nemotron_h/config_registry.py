"""Training configurations of Nemotron-H: `--module nemotron_h --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.nemotron_h import FAMILY

nemotron_h_debugmodel = small(FAMILY, "debugmodel")
nemotron_h_moe_debugmodel = small(FAMILY, "moe-debugmodel")
nemotron_h_8b = published(FAMILY, "8B", "Nemotron-H-8B-Base-8K", lr=3e-4, local_batch_size=2)
nemotron_h_30b_a3b = published(
    FAMILY,
    "3-Nano-30B-A3B",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16",
    lr=2e-4,
    local_batch_size=1,
)

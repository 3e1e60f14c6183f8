"""Training configurations of Kimi Linear: `--module kimi_linear --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.kimi_linear import FAMILY

kimi_linear_debugmodel = small(FAMILY, "debugmodel")
kimi_linear_48b = published(
    FAMILY, "48B-A3B", "Kimi-Linear-48B-A3B-Instruct", lr=3e-4, local_batch_size=1
)

"""Training configurations of gpt-oss: `--module gpt_oss --config debugmodel`."""

from torchtitan.models.common.recipes import small
from torchtitan.models.gpt_oss import FAMILY

gpt_oss_debugmodel = small(FAMILY, "debugmodel")

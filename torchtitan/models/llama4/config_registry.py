"""Training configurations of Llama 4: `--module llama4 --config debugmodel`."""

from torchtitan.models.common.recipes import small
from torchtitan.models.llama4 import FAMILY

llama4_debugmodel = small(FAMILY, "debugmodel")

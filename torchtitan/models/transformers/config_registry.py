"""Training configurations of classes of transformers: `--module transformers --config debugmodel`,
and those of `torchtitan.models.auto` for the model in a folder, `--module transformers --config sft
--hf_assets_path DIR`."""

from torchtitan.models.common.recipes import small
from torchtitan.models.transformers import FAMILY

transformers_debugmodel = small(FAMILY, "debugmodel")
transformers_debugmodel_dense = small(FAMILY, "debugmodel_dense")

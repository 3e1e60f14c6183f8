"""Training configurations of DeepSeek-V3: `--module deepseek_v3 --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.deepseek_v3 import FAMILY

deepseek_v3_debugmodel = small(FAMILY, "debugmodel")
deepseek_v3_sparse_debugmodel = small(FAMILY, "sparse-debugmodel")
deepseek_v3_mistral4_debugmodel = small(FAMILY, "mistral4-debugmodel")
deepseek_v3_671b = published(FAMILY, "V3-671B", "DeepSeek-V3", lr=2.2e-4, local_batch_size=1)
deepseek_v3_2_671b = published(FAMILY, "V3.2-671B", "DeepSeek-V3.2", lr=7e-6, local_batch_size=1)

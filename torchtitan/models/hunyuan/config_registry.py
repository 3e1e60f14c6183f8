"""Training configurations of Hunyuan: `--module hunyuan --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.hunyuan import FAMILY

hunyuan_debugmodel = small(FAMILY, "debugmodel")
hunyuan_moe_debugmodel = small(FAMILY, "moe-debugmodel")
hunyuan_500m = published(FAMILY, "0.5B", "Hunyuan-0.5B-Pretrain", lr=4e-4, local_batch_size=8)
hunyuan_7b = published(FAMILY, "7B", "Hunyuan-7B-Pretrain", lr=3e-4, local_batch_size=2)
hunyuan_80b = published(FAMILY, "80B-A13B", "Hunyuan-A13B-Pretrain", lr=2e-4, local_batch_size=1)

"""GLM-4.5 and 4.6 ("GLM-4.5", arXiv:2508.06471), and their Hugging Face format."""

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from torchtitan.models.common import gguf, gguf_rows
from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import MoEDecoder


class GLM4MoeModel(MoEDecoder):
    """A decoder with experts in all but the first layers; half of each head is rotated."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoEDecoder.Config):
        router_types = ("sigmoid",)

        use_qk_norm: bool = False
        """Normalize the queries and keys of each head."""

    config: Config

    biased = "qkv"

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        options.setdefault("qk_norm", self.make_norm if self.config.use_qk_norm else None)
        return super().make_attention(index, **options)


_TYPE = ModelType(
    architecture="Glm4MoeForCausalLM",
    config=GLM4MoeModel.Config,
    rows=lambda config: DENSE_ROWS + rows.expert_rows(config, shared="shared_experts"),
    keys={**rows.SIGMOID_KEYS, **{name: name for name in ("attention_bias", "use_qk_norm")}},
    values={"moe.selection_bias": True},
    fixed={"scoring_func": "sigmoid"},
    defaults={
        **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        **{
            "n_shared_experts": 1,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    },
    ignored=("first_k_dense_replace",),
    prepare=rows.prepare_dense_layers,
    write=rows.write_dense_layers,
)
FORMAT = dense_format({"glm4_moe": _TYPE})


def _check_gguf(config: GLM4MoeModel.Config) -> dict[str, object]:
    n_shared = config.moe.n_shared_experts
    gguf.require_gguf(n_shared > 0, "moe.n_shared_experts", n_shared, "at least 1")
    return {}


GGUF = gguf.gguf_format(
    gguf.Architecture(
        name="glm4moe",
        config=GLM4MoeModel.Config,
        rotation=gguf.Rotation(part=True),
        rows=lambda config: gguf_rows.POST_ATTENTION_NORM,
        experts=gguf.Experts(
            {"scoring_func": "sigmoid", "selection_bias": True, "shared_ffn_dim": None},
            chosen=gguf.CHOICES_OF_DEEPSEEK,
        ),
        keys=_check_gguf,
    )
)

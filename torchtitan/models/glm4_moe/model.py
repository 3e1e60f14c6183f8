"""GLM-4.5 and 4.6 ("GLM-4.5", arXiv:2508.06471), and their Hugging Face format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.feed_forward import GatedFeedForward
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.moe.layer import SigmoidMoEConfig
from torchtitan.models.common.moe.rows import SELECTION_ROW, expert_rows, shared_rows


class GLM4MoeModel(MoEDecoder):
    """A decoder with experts in all but the first layers; half of each head is rotated."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoEDecoder.Config):
        moe: SigmoidMoEConfig
        """Experts."""

        attention_bias: bool = False
        """Add biases to queries, keys and values."""

        use_qk_norm: bool = False
        """Normalize the queries and keys of each head."""

    config: Config

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        biases, norm = "qkv" if self.config.attention_bias else "", self.make_norm if self.config.use_qk_norm else None
        return super().make_attention(index, biases=biases, qk_norm=norm, **options)

    def router_parts(self) -> Mapping[str, Any]:
        return self.config.moe.router_parts()

    def make_shared(self, index: int) -> nn.Module:
        moe, config = self.config.moe, self.config
        width = (moe.ffn_dim or config.ffn_dim) * moe.n_shared_experts
        return GatedFeedForward(dim=config.dim, hidden_dim=width, **self.init_stds(index))


_DENSE = (*DENSE_ROWS, *shared_rows("shared_experts"), SELECTION_ROW)

_SAME = ("n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
_NAMES = {
    **{"n_routed_experts": "n_experts", "num_experts_per_tok": "top_k", "moe_intermediate_size": "ffn_dim"},
    **{"mlp_layer_types": "layer_types"},
    **{name: name for name in _SAME},
}


def _prepare(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with `mlp_layer_types` for the number of dense layers."""
    reader = ConfigReader("config.json", {"first_k_dense_replace": 1, **document})
    n_layers, first = reader.n_layers(), reader.values["first_k_dense_replace"]
    n_dense = first if first == 0 else min(n_layers, reader.whole_number("first_k_dense_replace"))
    others = {key: value for key, value in document.items() if key != "first_k_dense_replace"}
    return {**others, "mlp_layer_types": ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense)}


def _write(config: GLM4MoeModel.Config) -> dict[str, Any] | None:
    sparse = [config.moe.is_sparse(index) for index in range(config.n_layers)]
    if config.sliding_window is not None or config.moe.ffn_dim is None or sparse != sorted(sparse):
        return None
    return {"first_k_dense_replace": sparse.count(False)}


FORMAT = dense_format(
    {
        "glm4_moe": ModelType(
            architecture="Glm4MoeForCausalLM",
            config=GLM4MoeModel.Config,
            rows=lambda config: (*_DENSE, *expert_rows(config.moe.n_experts)),
            keys={
                **{key: f"moe.{name}" for key, name in _NAMES.items()},
                **{name: name for name in ("attention_bias", "use_qk_norm")},
            },
            defaults={
                **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
                **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
            },
            ignored=("num_nextn_predict_layers", "num_mtp_layers"),
            prepare=_prepare,
            write=_write,
        )
    }
)

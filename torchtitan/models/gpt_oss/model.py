"""gpt-oss (arXiv:2508.10925), and its Hugging Face format."""

from functools import partial

from torchtitan.models.common import gguf, gguf_rows
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.hugging_face_rope import write_rope_section
from torchtitan.models.common.layer_types import WINDOW_KEYS
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.moe.experts import ClampedExperts
from torchtitan.models.common.moe.router import Router
from torchtitan.models.common.moe.rows import LOCAL_KEYS, fused_expert_rows
from torchtitan.protocols.state_dict_adapter import KeyMapping


class GptOssModel(MoEDecoder):
    """A decoder with attention sinks, biases, windows in every second layer, and experts with a
    clamped activation."""

    has_sinks = True
    make_experts = ClampedExperts
    make_router = staticmethod(partial(Router, bias=True))


_SINKS = KeyMapping("layers.*.attention.sinks.scores", "model.layers.*.self_attn.sinks")
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types` and the scaling of RoPE, which have defaults."""
    n_layers = ConfigReader("config.json", document).n_layers()
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(n_layers)]
    is_scaled = document.get("rope_scaling") or document.get("rope_parameters")
    return {"layer_types": types, **document, **({} if is_scaled else {"rope_scaling": _YARN})}


_TYPE = ModelType(
    architecture="GptOssForCausalLM",
    config=GptOssModel.Config,
    rows=(*DENSE_ROWS, _SINKS, *fused_expert_rows("router", (0, 3, 2, 1))),
    keys={**WINDOW_KEYS, **LOCAL_KEYS, "attention_bias": "attention_bias"},
    fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    defaults={
        **{
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
        **{
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
        },
    },
    ignored=("experts_per_token", "initial_context_length"),
    prepare=_prepare,
    # also if unscaled
    write=lambda config: {"rope_parameters": write_rope_section(config.rope, config.max_seq_len)},
)
FORMAT = dense_format({"gpt_oss": _TYPE})


def _check_gguf(config: MoEDecoder.Config) -> dict[str, object]:
    has_biases, window = config.attention_bias, config.sliding_window
    gguf.require_gguf(has_biases, "attention_bias", has_biases, "True")
    gguf.require_gguf(window is not None, "sliding_window", window, "a window")
    return {}


GGUF = gguf.gguf_format(
    gguf.Architecture(
        name="gpt-oss",
        config=GptOssModel.Config,
        rotation=gguf.Rotation(scalings=("linear", "yarn", "yarn_untruncated")),
        rows=lambda config: gguf_rows.POST_ATTENTION_NORM,
        biased="qkvo",
        windows=("sliding_attention", "full_attention"),
        tying=gguf.Tying(copies=True),
        experts=gguf.Experts({"norm_topk_prob": True, "shared_ffn_dim": None}),
        keys=_check_gguf,
    )
)

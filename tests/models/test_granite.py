"""Features of Granite that Llama lacks: mistakes are caught. Sizes and config.json are as
published."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.family_cases import difference_with, random_reference
from torchtitan.distributed import initialize_weights
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.granite import FLAVORS, FORMATS, model_registry
from torchtitan.models.granite.model import GraniteModel
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform, compute_logits
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

READ, WRITE = FORMATS["hf"].from_external, FORMATS["hf"].to_external

GRANITE_3_8B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0",
    "use_cache": True,
    "vocab_size": 49159,
}
"""As published for 3.3 8B."""

GRANITE_4_MICRO = {
    **{key: value for key, value in GRANITE_3_8B.items() if key != "mlp_bias"},
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "hidden_size": 2560,
    "init_method": "mup",
    "intermediate_size": 8192,
    "layer_types": ["attention"] * 40,
    "logits_scaling": 10,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 40,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 40,
    "num_experts_per_tok": 0,
    "num_local_experts": 0,
    "output_router_logits": False,
    "position_embedding_type": "rope",
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 8192,
    "vocab_size": 100352,
}
"""With the keys of Granite 4.0."""

GRANITE_4_H_TINY = {
    **GRANITE_4_MICRO,
    "attention_multiplier": 0.0078125,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
    "logits_scaling": 6,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_heads": 48,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "shared_intermediate_size": 1024,
}
"""With Mamba and experts."""


# --- mistakes
# --------------------------------------------------------------------------------------------------


def embedding_not_multiplied(model: Any) -> None:
    model.config.embedding_multiplier = 1.0


def residual_not_multiplied(model: Any) -> None:
    for block in model.layers.values():
        block.multiplier = 1.0


def only_attention_multiplied_in_residual(model: Any) -> None:
    multiplier = model.config.residual_multiplier
    for block in model.layers.values():
        block.feed_forward.register_forward_hook(lambda module, args, out: out / multiplier)


def usual_scale_of_scores(model: Any) -> None:
    for block in model.layers.values():
        block.attention.attend = type(block.attention.attend)()


def logits_not_divided(model: Any) -> None:
    model.head.transform = UNCHANGED


def logits_multiplied(model: Any) -> None:
    model.head.transform = LogitTransform(multiplier=model.config.logits_scaling)


MISTAKES = [
    embedding_not_multiplied,
    residual_not_multiplied,
    only_attention_multiplied_in_residual,
    usual_scale_of_scores,
    logits_not_divided,
    logits_multiplied,
]


def exchanged_gate_and_up(model: Any) -> None:
    for block in model.layers.values():
        network = block.feed_forward
        network.w1, network.w3 = network.w3, network.w1


def positions_in_a_model_without(model: Any) -> None:
    model.config.position_embedding_type = "rope"


@pytest.mark.parametrize(
    ("model_type", "mistake"),
    [
        *(("granite", mistake) for mistake in MISTAKES),
        ("granitemoehybrid", exchanged_gate_and_up),
        ("granitemoehybrid", positions_in_a_model_without),
    ],
)
def test_mistake_is_caught(model_type: str, mistake: Callable[[Any], None]) -> None:
    multipliers = {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    }
    own = {"position_embedding_type": "nope"} if model_type == "granitemoehybrid" else {}
    reference = random_reference(model_type, 0, num_hidden_layers=3, **multipliers, **own)
    assert difference_with(lambda model: None, reference) < 1e-4
    assert difference_with(mistake, reference) > 1e-3


# --- sizes and config.json
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # Of the published weights, without the second copy of a tied matrix.
    [
        ("3.3-2B", 2_533_539_840),
        ("3.3-8B", 8_170_864_640),
        ("4.0-micro", 3_402_836_480),
    ],
)
def test_published_sizes(flavor: str, parameters: int) -> None:
    with torch.device("meta"):
        assert model_registry(flavor).model.build().num_parameters() == parameters
    assert READ(json.loads(json.dumps(WRITE(FLAVORS[flavor])))) == FLAVORS[flavor]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "billions"), [("4.0-H-micro", 3.19), ("4.0-H-tiny", 6.94), ("4.0-H-small", 32.2)]
)
def test_published_sizes_of_hybrids(flavor: str, billions: float) -> None:
    """The same number in transformers."""
    with torch.device("meta"):
        parameters = model_registry(flavor).model.build().num_parameters()
        config = transformers.AutoConfig.for_model(**WRITE(FLAVORS[flavor]))
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert parameters == theirs.num_parameters()
    assert parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert READ(json.loads(json.dumps(WRITE(FLAVORS[flavor])))) == FLAVORS[flavor]


@pytest.mark.parametrize(
    ("document", "flavor"),
    [
        (GRANITE_3_8B, "3.3-8B"),
        (GRANITE_4_MICRO, "4.0-micro"),
        (GRANITE_4_H_TINY, "4.0-H-tiny"),
    ],
)
def test_published_file_is_read_without_warning(
    document: dict[str, Any], flavor: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert READ(document) == FLAVORS[flavor]
    assert not caplog.records
    of_transformers_5 = transformers.AutoConfig.for_model(**document).to_dict()
    assert READ(of_transformers_5) == FLAVORS[flavor]


@pytest.mark.parametrize("document", [GRANITE_3_8B, GRANITE_4_MICRO])
def test_missing_keys_have_transformers_defaults(document: dict[str, Any]) -> None:
    required = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    required += ("vocab_size", "max_position_embeddings", "shared_intermediate_size", "layer_types")
    required += ("num_local_experts",)  # with experts by default, which are refused
    document = {key: value for key, value in document.items() if key in required}
    config, theirs = READ(document), transformers.AutoConfig.for_model(**document)
    assert config.n_kv_heads == theirs.num_key_value_heads
    assert (config.norm_eps, config.tie_embeddings) == (
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    for name in (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ):
        assert getattr(config, name) == getattr(theirs, name)
    if document["model_type"] == "granitemoehybrid":
        assert theirs.position_embedding_type is None and config.position_embedding_type == "nope"


@pytest.mark.parametrize(
    ("document", "change", "message"),
    [
        (GRANITE_3_8B, {"logits_scaling": 0}, "logits_scaling is 0"),
        (GRANITE_3_8B, {"attention_multiplier": None}, "attention_multiplier is None"),
        (GRANITE_3_8B, {"sliding_window_pattern": 2}, "sliding_window_pattern is 2"),
        (GRANITE_4_MICRO, {"layer_types": ["conv"] * 40}, "layer_types is .*'conv'"),
        (GRANITE_4_MICRO, {"layer_types": ["attention"]}, r"layer_types is \['full_attention'\]"),
        (GRANITE_4_MICRO, {"layer_types": "attention"}, "layer_types is 'attention'"),
        (GRANITE_4_MICRO, {"layers_block_type": ["mamba"] * 40}, "contradict each other"),
        (GRANITE_4_MICRO, {"num_local_experts": 64}, "num_experts_per_tok is 0"),
        (GRANITE_4_H_TINY, {"mamba_n_heads": 96}, "mamba_n_heads 96 .* contradict mamba_expand"),
        (GRANITE_4_H_TINY, {"mamba_d_head": None}, "mamba_d_head is None"),
        (GRANITE_4_H_TINY, {"mamba_n_groups": 7}, "mamba.n_groups is 7"),
        (GRANITE_4_H_TINY, {"time_step_limit": [0.1, 1.0]}, r"time_step_limit is \[0.1, 1.0\]"),
        (
            GRANITE_4_MICRO,
            {"position_embedding_type": "alibi"},
            "position_embedding_type is 'alibi'",
        ),
        (GRANITE_4_MICRO, {"mlp_bias": True}, "mlp_bias is True"),
    ],
)
def test_unsupported_values_are_refused_by_name(
    document: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        READ({**document, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
def test_types_of_layers_may_be_null_under_their_other_name(key: str) -> None:
    types = {"layer_types": None, "layers_block_type": None, key: GRANITE_4_H_TINY["layer_types"]}
    assert READ({**GRANITE_4_H_TINY, **types}) == FLAVORS["4.0-H-tiny"]


def test_absent_keys_of_layers_have_transformers_defaults() -> None:
    """Mamba in all layers, and experts in each."""
    absent = {"layer_types", "num_local_experts"}
    document = {name: value for name, value in GRANITE_4_H_TINY.items() if name not in absent}
    config, theirs = READ(document), transformers.AutoConfig.for_model(**document)
    assert config.layer_types == ["linear_attention"] and {*theirs.layer_types} == {
        "linear_attention"
    }
    assert config.moe.n_experts == theirs.num_local_experts == 8


def test_new_model_starts_like_one_without_factors() -> None:
    """Embedding of unit variance, logits of standard deviation 1/4, and results of layers as in
    Llama."""
    sizes = {"n_layers": 1, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 512, "rope": RoPEConfig()}
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    model = GraniteModel.Config(
        dim=64, ffn_dim=64, attention_multiplier=0.25, **sizes, **factors
    ).build()
    plain = Llama3Model.Config(dim=64, ffn_dim=64, **sizes).build()
    for decoder in (model, plain):
        initialize_weights(decoder, seed=0)
    tokens = torch.arange(512)[None]
    torch.testing.assert_close(model.embed(tokens), plain.embed(tokens))
    torch.testing.assert_close(
        0.22 * model.layers["0"].attention.wo.weight, plain.layers["0"].attention.wo.weight
    )
    hidden = torch.randn(1, 512, 64)
    torch.testing.assert_close(
        model.head(hidden, None, compute_logits),
        plain.head(hidden, None, compute_logits),
        rtol=1e-4,
        atol=1e-4,
    )

"""GGUF: numbers equal to transformers, read by transformers' own loader and by llama.cpp; refused
models; types of numbers.

llama.cpp is compared where `llama_cpp` is installed, which is compiled from source (pip install
llama-cpp-python==0.3.36).
"""

import copy
import dataclasses
import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import jinja2
import numpy
import pytest
import torch
from torch import Tensor

from tests.models.family_cases import CASES, DEFAULT_ROPE, LINEAR_ROPE, SIZES, random_reference
from torchtitan.cli.main import main
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.components.weights.export import format_for
from torchtitan.models import exaone, olmo_hybrid, qwen3
from torchtitan.models.families import families_with
from torchtitan.tools.errors import UserError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

VOCAB = 2048
"""Tokens of the embedded tokenizer."""

YARN = next(
    rope
    for rope in SIZES["rope_parameters"]
    if rope["rope_type"] == "yarn" and "attention_factor" not in rope
)
LLAMA3 = next(rope for rope in SIZES["rope_parameters"] if rope["rope_type"] == "llama3")
LATENT_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.7},
}
"""DeepSeek's, whose scores grow instead of cosines and sines."""

ROPES = (DEFAULT_ROPE, LINEAR_ROPE, YARN)

LIKE_GEMMA: dict[str, Any] = {"tie_word_embeddings": True, "attention_bias": False}
GEMMA2 = {**LIKE_GEMMA, "head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": None}
NO_BIAS = {"attention_bias": False}
SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}

LATENTS = {**NO_BIAS, "q_lora_rank": 20, "rms_norm_eps": 1e-6}

NETS: dict[str, Any] = {
    **{**NO_BIAS, "rms_norm_eps": 1e-6, "num_hidden_layers": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
MAMBA: dict[str, Any] = {"use_conv_bias": True, "use_bias": False, "mlp_bias": False}
GRANITE_MAMBA: dict[str, Any] = {
    **{"mamba_conv_bias": True, "mamba_proj_bias": False, "num_hidden_layers": 4},
    "layer_types": ("mamba", "attention"),
}
GEMMA4: dict[str, Any] = {**LIKE_GEMMA, "num_hidden_layers": 6, "layer_types": None}

FITTING: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "head_dim": 16},
    "qwen3": {"use_sliding_window": False, **NO_BIAS},
    "qwen3_moe": {**SPARSE, "norm_topk_prob": True, "use_sliding_window": False, **NO_BIAS},
    "qwen2_moe": {**SPARSE, "norm_topk_prob": False},
    "gemma": LIKE_GEMMA,
    "gemma2": {**GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**GEMMA2, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    # llama.cpp takes the long factors if its context, of at least 256, is beyond the original one.
    "phi3": {
        "hidden_size": 32,
        "sliding_window": None,
        "original_max_position_embeddings": 256,
        "max_position_embeddings": 512,
    },
    "olmo2": {"head_dim": 16, **NO_BIAS},
    "olmo3": {"head_dim": 16, **NO_BIAS, "layer_types": None, "num_hidden_layers": 4},
    "granite": {},
    "smollm3": {
        **NO_BIAS,
        "mlp_bias": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "sliding_window": None,
        "use_sliding_window": False,
        "num_hidden_layers": 4,
    },
    "glm4": {},
    "glm4_moe": {},
    "gpt_oss": {"attention_bias": True, "layer_types": None},
    "seed_oss": {"mlp_bias": False},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_layer_end_index": -1, "moe_layer_interval": 1},
    "hunyuan_v1_dense": NO_BIAS,
    "hunyuan_v1_moe": NO_BIAS,
    "exaone4": {"sliding_window": None, "layer_types": ("full_attention",), "head_dim": 16},
    "minimax_m2": {"rotary_dim": None},
    "llama4_text": {
        **{**NO_BIAS, "attention_chunk_size": 8192, "no_rope_layers": None, "floor_scale": 8192},
        **{"attn_scale": 0.1, "attn_temperature_tuning": True, "use_qk_norm": True},
        **{"no_rope_layer_interval": 4, "moe_layers": None, "num_hidden_layers": 4},
    },
    "lfm2": {"conv_bias": False, "layer_types": ("conv", "full_attention")},
    "lfm2_moe": {
        **{"conv_bias": False, "layer_types": ("full_attention", "conv", "conv")},
        **{"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    },
    "ministral3": {"sliding_window": None},
    "deepseek_v3": {**LATENTS, "rope_interleave": True},
    "deepseek_v2": {**LATENTS, "topk_method": "greedy"},
    "glm4_moe_lite": {**LATENTS, "rope_interleave": True, "mlp_layer_types": ("sparse",)},
    "mistral4": {**LATENTS, "rope_interleave": True},
    "deepseek_v32": {**LATENTS, "index_head_dim": 64},
    "glm_moe_dsa": {**LATENTS, "index_head_dim": 64},
    "glm_moe_dsa, shared": {**LATENTS, "index_head_dim": 64},
    "glm": {**NO_BIAS, "head_dim": 16},
    "exaone_moe": {
        "layer_types": ("sliding_attention", "full_attention"),
        "mlp_layer_types": None,
    },
    "qwen3_next": {**NETS, **SPARSE, "norm_topk_prob": True},
    "qwen3_5_text": {**NETS, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "qwen3_5_moe_text": {**NETS, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "granitemoehybrid": {"num_hidden_layers": 3},
    "granitemoehybrid, Mamba": GRANITE_MAMBA,
    "granitemoehybrid, experts": GRANITE_MAMBA,
    "nemotron_h": MAMBA,
    "nemotron_h, experts": {
        **MAMBA,
        "layers_block_type": ("full_attention", "moe", "linear_attention"),
    },
    "kimi_linear": {
        **{**LATENTS, "q_lora_rank": None, "norm_topk_prob": True, "num_hidden_layers": 4},
        **{"linear_num_heads": 4, "layer_types": ("linear_attention", "full_attention")},
        "mlp_layer_types": ("sparse",),
    },
    "gemma4_text": GEMMA4,
    "gemma4_text, small": {
        **{**GEMMA4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB},
        "layer_types": ("sliding_attention", "full_attention"),
    },
    # All experts, since the table of GELU changes close choices.
    "gemma4_text, experts": {**GEMMA4, "num_experts": 4, "top_k_experts": 4},
}
"""Type → options of `family_cases` with which llama.cpp computes it."""


def fitting(name: str, seed: int) -> dict[str, Any]:
    ropes = [*ROPES, LLAMA3] if name in ("llama", "exaone4", "exaone_moe") else ROPES
    if name == "llama4_text":
        ropes = [DEFAULT_ROPE, LINEAR_ROPE, LLAMA3]
    if name.startswith("glm_moe_dsa"):
        ropes = [DEFAULT_ROPE]
    if name.startswith(("deepseek", "glm4_moe_lite")):
        ropes = [DEFAULT_ROPE, LATENT_YARN, {**LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}]
    if name == "deepseek_v32":
        ropes = [ropes[0], ropes[2]]
    rope = copy.deepcopy(ropes[seed % len(ropes)])
    options = {"hidden_size": 64, "vocab_size": VOCAB, **FITTING.get(name, {})}
    if name in ("phi3", "nemotron_h", "nemotron_h, experts", "kimi_linear"):
        return options
    if name in ("glm", "glm4", "glm4_moe"):
        return {**options, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}
    if name == "exaone4" and seed == 3:  # the only size with windows
        types = ("sliding_attention",) * 3 + ("full_attention",)
        options |= {"num_hidden_layers": 64, "sliding_window": 16, "layer_types": types}
    if "linear_key_head_dim" in options:  # with and without an interval
        types = ("linear_attention", "full_attention")
        options["layer_types"] = types if seed % 2 else types[::-1]
    if name == "mistral4":
        more = {**LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
        return {**options, "rope_parameters": {**more, "llama_4_scaling_beta": seed / 2}}
    if name.startswith("gemma4"):
        full = {**DEFAULT_ROPE, "rope_type": "proportional", "partial_rotary_factor": 0.25}
        ropes = [full, {**full, "factor": 3.0}, DEFAULT_ROPE, LINEAR_ROPE]
        local = {**DEFAULT_ROPE, "rope_theta": 100.0}
        rope = {"full_attention": ropes[seed % 4], "sliding_attention": local}
    if name == "ministral3":
        more = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": seed / 2}
        return {**options, "rope_parameters": {**YARN, **more}}
    if name in ("gemma3_text", "olmo3"):
        local = {**DEFAULT_ROPE, "rope_theta": 100.0 if name == "gemma3_text" else 1e4}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {**options, "rope_parameters": rope}


def save(folder: Path, name: str, seed: int, **fixed: Any) -> Any:
    """Save a random model of transformers, with the embedded tokenizer."""
    reference = random_reference(name, seed, **{**fitting(name, seed), **fixed})
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    for key, value in ids.items():
        setattr(reference.config, key, value)
    reference.save_pretrained(folder)
    for file in EMBEDDED_TOKENIZER.glob("*.json"):
        shutil.copy(file, folder)
    return reference


def convert(*words: object) -> int:
    return main(["convert", "--to", "gguf", *map(str, words)])


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY,
    reason="the size of files is limited",
)
def test_a_disk_that_is_full_at_any_byte_leaves_no_file(tmp_path, capsys):
    """Also if it refuses only the last bytes, of the small norm; the message names the cause."""
    save(tmp_path / "model", "gemma", 0)
    target = tmp_path / "out"
    assert convert(tmp_path / "model", target) == 0
    size = (target / "model.gguf").stat().st_size
    shutil.rmtree(target)
    for limit in (size // 2, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            assert convert(tmp_path / "model", target) == 3
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert "out failed: [Errno 27] File too large" in capsys.readouterr().err
        assert not target.exists()


CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As published, which llama-cpp-python replaces by a function of its own."""


@pytest.mark.parametrize("template, written", [(CHATML, "{# #}" + CHATML), (CHATML + " ", None)])
def test_replaced_templates_get_a_comment(template, written, tmp_path):
    save(tmp_path / "hf", "llama", seed=0)
    (tmp_path / "hf" / "chat_template.jinja").write_text(template)
    assert convert(tmp_path / "hf", tmp_path / "out") == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    text = reader.get_field("tokenizer.chat_template").contents()
    assert text == (written or template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    rows = [{"role": "user", "content": "Hi."}]
    ours, theirs = (
        tokenizer.apply_chat_template(rows, chat_template=one, tokenize=False)
        for one in (text, template)
    )
    assert ours == theirs


def random_ids(length: int) -> Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def relative_difference(ours: Tensor, reference: Any, ids: Tensor) -> float:
    """Return the largest difference of logits, in standard deviations of the reference's."""
    theirs = reference(ids).logits[0]
    return ((ours - theirs).abs().max() / theirs.std()).item()


PLAIN = {
    "rope_parameters": DEFAULT_ROPE,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 128,
}
"""Options of models that transformers reads from GGUF: it drops Llama's biases, scalings,
and the width of Qwen3's heads."""


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_equal_models(name, tmp_path):
    known = {key: value for key, value in PLAIN.items() if key in {**SIZES, **CASES[name].options}}
    if name == "qwen2":
        known["head_dim"] = 16
    reference = save(tmp_path / "hf", name, seed=0, **known)
    assert convert(tmp_path / "hf", tmp_path / "out") == 0
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    ids = random_ids(12)
    with torch.no_grad():
        assert relative_difference(read(ids).logits[0], reference, ids) < 1e-5  # rounding
    assert (read.config.bos_token_id, read.config.eos_token_id) == (0, 1)


def by_llama_cpp(folder: Path, ids: Tensor, *words: str) -> tuple[Any, Tensor]:
    """Convert the model in FOLDER/hf with options, and return it in llama.cpp, and its logits
    (L, V)."""
    llama_cpp = pytest.importorskip("llama_cpp")
    shutil.rmtree(folder / "out", ignore_errors=True)
    assert convert(*words, folder / "hf", folder / "out") == 0
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(
        str(folder / "out" / "model.gguf"), n_ctx=128, logits_all=True, verbose=False, **exact
    )
    model.eval(ids[0].tolist())
    return model, torch.tensor(numpy.array(model.scores[: ids.shape[1]]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_llama_cpp_computes_experts_of_granite_without_mamba(seed, tmp_path):
    attention = {"layer_types": ("attention",), "position_embedding_type": "rope"}
    reference = save(tmp_path / "hf", "granitemoehybrid, experts", seed, **attention)
    ids = random_ids(40)
    model, logits = by_llama_cpp(tmp_path, ids)
    assert model.metadata["general.architecture"] == "granitemoe"
    assert relative_difference(logits, reference, ids) < 5e-5  # rounding


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FITTING)
def test_llama_cpp_computes_equal_models(name, seed, tmp_path):
    reference = save(tmp_path / "hf", name, seed)
    ids = random_ids(40)  # beyond the windows
    model, logits = by_llama_cpp(tmp_path, ids)
    # llama.cpp looks up GELU in a table of float16. Norms in delta nets magnify rounding, here and
    # in transformers.
    tolerances = {"gemma": 1e-2, "qwen3_next": 3e-4, "qwen3_5": 3e-4, "kimi_linear": 3e-4}
    tolerance = next((t for start, t in tolerances.items() if name.startswith(start)), 5e-5)
    assert relative_difference(logits, reference, ids) < tolerance
    if seed == 0 and not re.fullmatch("gemma2?|gemma3_text", name):  # near choices may differ
        model.reset()
        prompt = ids[0, :8].tolist()
        tokens = [t for t, _ in zip(model.generate(prompt, temp=0.0), range(12), strict=False)]
        expected = reference.generate(
            ids[:, :8], max_new_tokens=12, do_sample=False, eos_token_id=VOCAB
        )
        assert tokens == expected[0, 8:].tolist()


STEPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "Q8_0": 2.0**-6}
"""Rounding of weights, and of the inputs of products, in llama.cpp: in Q8_0, half of 1/127 of a
block's largest value, which is several times the block's deviation."""

MAGNIFIED = ("qwen3_next", "qwen3_5", "kimi_linear")
"""Models whose delta nets magnify differences, also in float32."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTING)
def test_llama_cpp_computes_narrow_types(name, tmp_path):
    """Logits within the rounding of the type, except at the places where it changes the choice of
    an expert or of a token to attend to, so the median over the places is compared. Each token of a
    greedy text is one whose logit is the highest of transformers' too, to that rounding."""
    reference = save(tmp_path / "hf", name, seed=0)
    ids = random_ids(40)
    with torch.no_grad():
        theirs = reference(ids).logits[0]
    for kind, step in STEPS.items():
        option = "--quantize" if kind == "Q8_0" else "--export_dtype"
        model, ours = by_llama_cpp(tmp_path, ids, option, kind)
        differences = (ours - theirs).square().mean(-1).sqrt() / theirs.std()
        bound = (24 if name.startswith(MAGNIFIED) else 8) * step
        assert differences.median() < bound, kind
        if kind == "float16":
            model.reset()
            prompt = ids[0, :8].tolist()
            tokens = [t for t, _ in zip(model.generate(prompt, temp=0.0), range(12), strict=False)]
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + tokens])).logits[0, 7:-1]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert ((logits.amax(-1) - chosen) / logits.std()).max() < 2 * bound


def converted(family: Any, config: Any, name: str, *tensors: Tensor) -> Tensor:
    """Return a tensor of a file, from ours."""
    steps = family.FORMATS["gguf"].adapter(config).steps
    step = next(step for step in steps if name in step.external)
    return step.transform.to_external(list(tensors))[step.external.index(name)]


def test_value_heads_of_qwen3_5_take_turns():
    """As llama.cpp repeats keys: the first value head of each key head, then the second of each;
    Qwen3-Next's keep their places."""
    from torchtitan.models import qwen3_5, qwen3_next

    config = dataclasses.replace(qwen3_5.FLAVORS["debugmodel"], vocab_size=VOCAB)
    n_keys, n_values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = torch.arange(n_values, dtype=torch.float32)
    order = [
        k * (n_values // n_keys) + turn for turn in range(n_values // n_keys) for k in range(n_keys)
    ]
    assert converted(qwen3_5, config, "blk.0.ssm_dt.bias", heads).tolist() == order
    rows = heads.repeat_interleave(config.linear_value_head_dim)[:, None].expand(-1, 3)
    z = converted(qwen3_5, config, "blk.0.attn_gate.weight", rows)
    width = config.linear_value_head_dim
    assert z[::width, 0].tolist() == order and torch.equal(z[0:width], z[:1].expand(width, -1))
    out = converted(qwen3_5, config, "blk.0.ssm_out.weight", rows.mT)
    assert torch.equal(out, z.mT)
    keys = torch.full((n_keys * config.linear_key_head_dim, 3), -1.0)
    qkv = converted(qwen3_5, config, "blk.0.attn_qkv.weight", keys, keys, rows)
    assert torch.equal(qkv[-len(z) :], z) and (qkv[: -len(z)] == -1).all()
    rates = converted(qwen3_5, config, "blk.0.ssm_a", heads)
    assert torch.equal(rates, -torch.tensor(order).exp())
    other = dataclasses.replace(qwen3_next.FLAVORS["debugmodel"], vocab_size=VOCAB)
    heads = torch.arange(other.linear_num_value_heads, dtype=torch.float32)
    assert torch.equal(converted(qwen3_next, other, "blk.0.ssm_dt.bias", heads), heads)


def test_recurrences_stay_in_float32(tmp_path):
    """And are matrices, as llama.cpp reads them."""
    save(tmp_path / "hf", "nemotron_h", seed=0)
    assert convert("--quantize", "Q8_0", tmp_path / "hf", tmp_path / "out") == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    layer = next(name for name in tensors if name.endswith(".ssm_a")).removesuffix(".ssm_a")
    names = ("ssm_a", "ssm_d", "ssm_norm.weight", "ssm_conv1d.weight", "ssm_dt.bias")
    assert {tensors[f"{layer}.{name}"].tensor_type.name for name in names} == {"F32"}
    assert tensors[f"{layer}.ssm_in.weight"].tensor_type.name == "Q8_0"
    n_heads = reader.get_field("nemotron_h.ssm.time_step_rank").contents()
    rates = tensors[f"{layer}.ssm_a"].data
    assert rates.shape == (n_heads, 1) and (rates < 0).all()


def test_rows_of_heads_are_in_metas_order(tmp_path):
    """As in files of llama.cpp: rows of the two halves of a head take turns."""
    from torchtitan.models import llama3

    reference = save(tmp_path / "hf", "llama", seed=0, rope_parameters=DEFAULT_ROPE)
    model = llama3.FORMATS["hf"].from_external(reference.config.to_dict())
    steps = llama3.FORMATS["gguf"].adapter(model).steps
    step = next(step for step in steps if step.external == ("blk.0.attn_q.weight",))
    weight = reference.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    (permuted,) = step.transform.to_external([weight])
    n_heads = reference.config.num_attention_heads
    halves = weight.view(n_heads, 2, len(weight) // n_heads // 2, -1)
    assert torch.equal(permuted, halves.transpose(1, 2).reshape_as(weight))
    assert not torch.equal(permuted, weight)


@pytest.mark.parametrize(
    "options, kind, bound",
    [
        (["--export_dtype", "float32"], "F32", 0.0),
        (["--export_dtype", "float16"], "F16", 2**-11),
        (["--export_dtype", "bfloat16"], "BF16", 2**-8),
        (["--quantize", "Q8_0"], "Q8_0", None),
    ],
    ids=lambda value: str(value),
)
def test_types_of_numbers(options, kind, bound, tmp_path):
    reference = save(tmp_path / "hf", "qwen3", seed=1)
    assert convert(*options, tmp_path / "hf", tmp_path / "out") == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = reference.state_dict()
    for name, theirs in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
    ):
        tensor, expected = tensors[name], state[theirs]
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert values.shape == expected.shape
        is_vector = expected.ndim == 1
        fits = expected.shape[-1] % 32 == 0
        wanted = "F32" if is_vector else kind if kind != "Q8_0" or fits else "F16"
        assert tensor.tensor_type.name == wanted
        difference = (values - expected).abs()
        if is_vector:
            assert not difference.any()
        elif wanted == "Q8_0":  # half a step of the block's largest value, and the scale's rounding
            largest = expected.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
            assert (difference.unflatten(-1, (-1, 32)) <= largest * (0.5 / 127 + 2**-10)).all()
            assert difference.any()
        else:
            assert (difference <= expected.abs() * (bound or 2**-11) + 1e-7).all()


@pytest.mark.slow
def test_llama_cpp_has_every_tensor():
    """All names are of the package gguf, under their architecture."""
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    n_checked = 0
    for family in families_with("gguf"):
        for flavor, config in family.FLAVORS.items():
            config = copy.deepcopy(config)
            config.vocab_size = VOCAB
            # few layers, but of all kinds
            least = min(12, max(2, len(getattr(config, "layer_types", ()))))
            n_shared = getattr(config, "num_kv_shared_layers", 0)
            config.n_layers = min(config.n_layers, least + n_shared)
            try:
                name = family.FORMATS["gguf"].to_external(config)["general.architecture"]
                names = family.FORMATS["gguf"].adapter(config).external_names
            except UserError as error:
                assert "GGUF cannot hold this model" in str(error), flavor
                continue
            # The package has no list for this one, which llama.cpp reads like GLM-5.
            listed = "glm-dsa" if name == "deepseek32" else name
            known = {
                gguf.TENSOR_NAMES[tensor].replace("{bid}", "*")
                for tensor in gguf.MODEL_TENSORS[architectures[listed]]
            }
            generic = {
                re.sub(r"\.(weight|bias|scale)$", "", re.sub(r"\.\d+\.", ".*.", name))
                for name in names
            }
            assert generic <= known, (flavor, generic - known)
            n_checked += 1
    assert n_checked > 60


def test_published_sizes_of_exaone_4_are_written():
    """With Llama 3's RoPE, whose divisors are a tensor, and with windows in the larger one."""
    for flavor in ("4.0-1.2B", "4.0-32B"):
        config = exaone.FLAVORS[flavor]
        assert exaone.FORMATS["gguf"].to_external(config)["block_count"] == config.n_layers
        assert "rope_freqs.weight" in exaone.FORMATS["gguf"].adapter(config).external_names


@pytest.mark.parametrize(
    "name, fixed, message",
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "--model.rope.scaling is dynamic, but llama.cpp requires llama3 or linear or yarn",
        ),
        (
            "qwen2",
            {"head_dim": 8},
            "--model.head_dim is 8, but llama.cpp requires dim / n_heads = 16",
        ),
        (
            "qwen3",
            {"attention_bias": True},
            "--model.attention_bias is True, but llama.cpp requires a model without these biases",
        ),
        (
            "gemma2",
            {"query_pre_attn_scalar": 256},
            "--model.query_pre_attn_scalar is 256, but llama.cpp requires 16 in such a model",
        ),
        (
            "gemma",
            {"tie_word_embeddings": False},
            "--model.tie_embeddings is False, but llama.cpp requires True",
        ),
        (
            "qwen3_moe",
            {"norm_topk_prob": False},
            "--model.moe.norm_topk_prob is False, but llama.cpp requires True",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "but llama.cpp requires experts in all layers"),
        ("smollm3", {"no_rope_layer_interval": 2}, "but llama.cpp requires [1, 1, 1, 0]"),
        ("gpt_oss", {"sliding_window": None}, "but llama.cpp requires a window"),
        ("deepseek_v3", {"q_lora_rank": None}, "requires None in 26 or 27 layers only"),
        (
            "deepseek_v3",
            {"rope_parameters": {**LATENT_YARN, "mscale": 0.4}},
            "but llama.cpp requires 1.0 with YaRN",
        ),
        ("lfm2", {"layer_types": ("conv",)}, "but llama.cpp requires convolutions and attention"),
        (
            "granitemoehybrid, experts",  # llama.cpp rotates queries and keys all the same
            {"layer_types": ("attention",), "position_embedding_type": "nope"},
            "position_embedding_type is nope, but llama.cpp requires rope with experts alone",
        ),
        (
            "exaone4",
            {"sliding_window": 16, "num_hidden_layers": 3, "layer_types": ("sliding_attention",)},
            "but llama.cpp requires a window in 64 layers only",
        ),
        (
            "llama4_text",
            {"floor_scale": 9},
            "--model.floor_scale is 9, but llama.cpp requires 8192",
        ),
        ("llama4_text", {"moe_layers": [0]}, "but llama.cpp requires experts in every n-th layer"),
        (
            "ministral3",
            {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0}},
            "but llama.cpp requires 1.0 with YaRN",
        ),
        ("deepseek_v3", {"rms_norm_eps": 1e-3}, "requires at most 1e-05, since it adds that to"),
        ("deepseek_v32", {"index_head_dim": 12}, "but llama.cpp requires a multiple of 64"),
        (
            "deepseek_v32",
            {"rope_parameters": LATENT_YARN},
            "--model.mscale_all_dim is 0.7, but llama.cpp requires 1.0 with YaRN",
        ),
        (
            "glm_moe_dsa",
            {"rope_parameters": LATENT_YARN},
            "--model.rope.scaling is yarn, but llama.cpp requires no scaling",
        ),
        ("exaone_moe", {"layer_types": ("full_attention",)}, "requires a layer with a window"),
        (
            "qwen3_next",
            {"layer_types": ("full_attention",)},
            "but llama.cpp requires linear_attention and full_attention",
        ),
        (
            "qwen3_5_text",
            {"linear_value_head_dim": 8},
            "llama.cpp requires --model.linear_key_head_dim 16",
        ),
        ("nemotron_h", {"use_conv_bias": False}, "--model.mamba.conv_bias is False, but llama"),
        (
            "nemotron_h, experts",
            {"layers_block_type": ("linear_attention", "moe", "full_attention", "mlp")},
            "llama.cpp requires moe, and not mlp, with --model.moe",
        ),
        ("kimi_linear", {"linear_num_heads": 2}, "but llama.cpp requires --model.n_heads 4"),
        (
            "gemma4_text, small",
            {"num_kv_shared_layers": 3},
            "llama.cpp requires such that the last layer before them has full attention",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "--model.moe.n_group is 4, but llama.cpp requires 1 without the bias",
        ),
    ],
)
def test_refusals(name, fixed, message, tmp_path, capsys):
    save(tmp_path / "hf", name, seed=0, **fixed)
    assert convert(tmp_path / "hf", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mixtral", {"ffn_dim": 24}, "--model.moe.ffn_dim is 24, but llama.cpp requires --model."),
        ("qwen3_moe", {"shared_ffn_dim": None}, "--model.moe.shared_ffn_dim is None, but llama"),
    ],
)
def test_experts_of_other_widths_are_refused(name, changes, message):
    """No file of transformers describes these models; options do."""
    family = next(each for each in families_with("gguf") if each.__name__.endswith(name))
    config = copy.deepcopy(
        next(
            flavor
            for flavor in family.FLAVORS.values()
            if name == "mixtral" or flavor.moe.shared_ffn_dim
        )
    )
    config.vocab_size = VOCAB
    family.FORMATS["gguf"].to_external(config)
    for key, value in changes.items():
        setattr(config.moe, key, value)
    with pytest.raises(UserError, match=re.escape(message)):
        family.FORMATS["gguf"].to_external(config)


def test_a_vocabulary_without_bos_names_a_token(tmp_path, capsys):
    """llama.cpp has a default for an absent one, and writes its text for `bos_token`."""
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    for name, named, expected in (("config", 3, 3), ("eos", None, 1)):
        folder = tmp_path / name
        save(folder, "llama", 0)
        (folder / "chat_template.jinja").write_text(template)
        for file, changes in {
            "tokenizer_config.json": {"bos_token": None, "add_bos_token": False},
            "tokenizer.json": {"post_processor": None},
            "config.json": {"bos_token_id": named, "eos_token_id": 1},
            "generation_config.json": {"bos_token_id": named, "eos_token_id": 1},
        }.items():
            path = folder / file
            known = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**known, **changes}))
        assert convert(folder, tmp_path / "out" / name) == 0
        assert f"no BOS; the file names the token {expected} for it" in capsys.readouterr().err
        fields = gguf.GGUFReader(tmp_path / "out" / name / "model.gguf").fields
        assert fields["tokenizer.ggml.bos_token_id"].contents() == expected
        assert fields["tokenizer.ggml.add_bos_token"].contents() is False
        source = fields["tokenizer.chat_template"].contents()
        written = jinja2.Template(source).render(bos_token=",", messages=[{"content": "Hi"}])
        assert written == "Hi"


def test_ids_without_a_token_are_left_out(tmp_path, capsys):
    save(tmp_path / "hf", "llama", seed=0)
    path = tmp_path / "hf" / "config.json"
    ids = {"pad_token_id": -1, "eos_token_id": [1, 2]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **ids}))
    (tmp_path / "hf" / "generation_config.json").unlink()
    assert convert(tmp_path / "hf", tmp_path / "out") == 0
    assert "no padding_token_id: the model has no token -1" in capsys.readouterr().err
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert reader.get_field("tokenizer.ggml.eot_token_id").contents() == 2
    assert reader.get_field("tokenizer.ggml.padding_token_id") is None


def test_window_limits_the_context(tmp_path, capsys):
    save(tmp_path / "hf", "mistral", seed=0, sliding_window=16)
    assert convert(tmp_path / "hf", tmp_path / "out") == 0
    assert (
        "the file's context is --model.sliding_window 16 tokens instead of 128"
        in capsys.readouterr().err
    )
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert reader.get_field("llama.context_length").contents() == 16


def test_other_refusals(tmp_path, capsys):
    config = dataclasses.replace(qwen3.FLAVORS["debugmodel"], vocab_size=VOCAB)
    with pytest.raises(UserError, match="Qwen3Model has no architecture in llama.cpp"):
        exaone.FORMATS["gguf"].to_external(config)
    with pytest.raises(UserError, match="olmo_hybrid does not support the format 'gguf'"):
        format_for(olmo_hybrid.model_registry("debugmodel"), "gguf")
    save(tmp_path / "2", "llama", seed=0)
    assert (
        convert("--export_dtype", "float16", "--quantize", "Q8_0", tmp_path / "2", tmp_path / "o")
        == 2
    )
    assert "--export_dtype has no effect with --quantize Q8_0" in capsys.readouterr().err
    (tmp_path / "2" / "tokenizer.json").unlink()
    assert convert(tmp_path / "2", tmp_path / "out") == 2
    assert "GGUF needs the model's tokenizer" in capsys.readouterr().err


def test_cases_are_known():
    assert FITTING.keys() <= CASES.keys()

"""Packed documents in classes of transformers: each gets the logits and gradients that it has
alone, in the class's own default implementation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.equivalence.workers import Workers
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import checkpoint_wrapper

transformers = pytest.importorskip("transformers")

from torchtitan.models.transformers import packing, tiny  # noqa: E402
from torchtitan.models.transformers.tiny import tiny_config  # noqa: E402

LENGTHS = [30, 3, 1, 14, 20, 28]
"""Tokens of the documents in two rows; the windows and chunks of tiny models have 8."""

LFM2 = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
QWEN2_VL = {
    "text_config": {
        **{
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
        },
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "kernel"),
    "windows and soft caps": ("gemma2", {}, "kernel"),
    "latent attention": ("deepseek_v3", {}, "kernel"),
    "learned positions": ("opt", {}, "kernel"),
    "chunks": ("llama4_text", {"attn_temperature_tuning": False}, "kernel"),
    "text of images": ("qwen2_vl", QWEN2_VL, "kernel"),
    "sinks": ("gpt_oss", {}, "masks"),
    "ALiBi": ("falcon", {"alibi": True}, "masks"),
    "scale by the place in a row": ("llama4_text", {}, "rows"),
    "state space": ("mamba", {}, "rows"),
    "state space with attention": ("bamba", {}, "rows"),
    "delta net": ("qwen3_next", {}, "rows"),
    "convolution": ("lfm2", LFM2, "rows"),
}


def make_config(case: str) -> Any:
    model_type, fields, _ = CASES[case]
    return transformers.AutoConfig.for_model(model_type, **fields)


def make_models(case: str) -> tuple[packing.Packing, nn.Module, nn.Module]:
    """Return the way to pack, and a tiny model of the class as it is by default and as packing
    needs it. Its weights are so large that other documents would change the logits by far more than
    rounding."""
    config = make_config(case)
    chosen, tiny = packing.choose_packing(config), tiny_config(config)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = (
        transformers.AutoModelForCausalLM
        if case != "text of images"
        else transformers.AutoModelForImageTextToText
    )
    assert (config.model_type in names) == (auto is transformers.AutoModelForCausalLM)
    torch.manual_seed(0)
    default = auto.from_config(copy.deepcopy(tiny))
    with torch.no_grad():
        for parameter in default.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = auto.from_config(copy.deepcopy(tiny), attn_implementation=chosen.implementation)
    model.load_state_dict(default.state_dict())
    return chosen, default.eval(), model.eval()


def make_batch() -> tuple[Tensor, AttentionMetadata]:
    tokens_BL = torch.randint(8, 64, (2, 48), generator=torch.Generator().manual_seed(0))
    positions_BL = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, 48)
    return tokens_BL, AttentionMetadata.from_positions(positions_BL)


def loss_of(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[..., 3].sum()


def checkpoint(model: Any) -> None:
    """Recompute each block in the backward pass."""
    blocks = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in model._no_split_modules
    ]
    assert blocks
    for name in blocks:
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))


def assert_equal_gradients(model: nn.Module, expected: nn.Module) -> None:
    """To 1e-5 of the largest: sums in another order round differently, about 1e-6."""
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad
        for name, p in model.named_parameters()
    }
    largest = max(p.grad.abs().max() for p in expected.parameters() if p.grad is not None)
    for name, parameter in expected.named_parameters():
        if parameter.grad is not None:
            error = (gradients[name] - parameter.grad).abs().max()
            assert error < 1e-5 * largest, name


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_equal_each_alone(case: str) -> None:
    """Logits, and gradients with recomputed blocks; also rows of one document."""
    chosen, default, model = make_models(case)
    assert chosen.mode == CASES[case][2]
    tokens_BL, attention = make_batch()
    alone = [default(document[None]).logits for document in tokens_BL.flatten().split(LENGTHS)]
    expected = torch.cat(alone, 1).view(2, 48, -1)
    checkpoint(model)
    logits = chosen.gather(chosen.run(model, tokens_BL, attention).logits, attention)
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
    loss_of(logits).backward()
    loss_of(expected).backward()
    assert_equal_gradients(model, default)
    with torch.no_grad():
        plain, whole = chosen.run(model, tokens_BL, None).logits, default(tokens_BL).logits
    torch.testing.assert_close(plain, whole, rtol=0, atol=bound)
    assert (whole - expected).abs().max() > 1000 * bound, "a leak would not be seen"


def test_compiled_blocks_have_one_graph_for_all_batches() -> None:
    chosen, default, model = make_models("windows and soft caps")
    tokens_BL, attention = make_batch()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    for batch in (attention, AttentionMetadata.from_positions(torch.arange(24).repeat(2, 2))):
        logits = chosen.run(model, tokens_BL, batch, static=True).logits
        expected = torch.cat(
            [default(x[None]).logits for x in tokens_BL.flatten().split(batch.lengths)], 1
        )
        torch.testing.assert_close(
            logits, expected.view_as(logits), rtol=0, atol=1e-5 * expected.abs().max().item()
        )
    # At most one with a window, and one without.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] in (1, 2)


@pytest.mark.parametrize(
    ("fault", "case", "mode"),
    [
        ("no window", "windows and soft caps", "masks"),
        ("no soft cap", "windows and soft caps", "masks"),
        ("documents forgotten in our attention", "llama", "masks"),
        ("documents forgotten in masks", "sinks", "rows"),
        ("an unknown option", "sinks", "masks"),
    ],
)
def test_the_probe_sees_faults(
    fault: str, case: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_results", {})
    if fault == "no window":
        monkeypatch.setattr(packing, "_window", lambda mask_function: (True, None))
    elif fault == "no soft cap":
        uncapped = packing.Attention
        monkeypatch.setattr(packing, "Attention", lambda scale, softcap: uncapped(scale=scale))
    elif fault == "documents forgotten in our attention":
        whole_rows = AttentionMetadata.of_rows(2, 64)
        monkeypatch.setattr(
            packing.Documents,
            "with_kernel",
            lambda self, **p: packing.with_kernel(whole_rows, **p, static=False),
        )
    elif fault == "documents forgotten in masks":
        monkeypatch.setattr(packing, "_remap", lambda mask_function, positions_BL: mask_function)
    else:  # without the error, sinks would have no effect
        monkeypatch.setattr(packing, "_WITHOUT_EFFECT", {*packing._WITHOUT_EFFECT, "s_aux"})
    assert packing.choose_packing(make_config(case)).mode == mode


def test_dropout_of_attention_keeps_documents_apart() -> None:
    """With equal random numbers, other tokens in a document change nothing in the others."""
    chosen, _, model = make_models("llama")
    tokens_BL, attention = make_batch()
    changed_BL = tokens_BL.clone()
    changed_BL[:, :20] = 9
    results = []
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    for tokens in (tokens_BL, changed_BL, tokens_BL):
        torch.manual_seed(len(results) // 2)
        results.append(chosen.run(model, tokens, attention).logits)
    first, other, redrawn = results
    assert torch.equal(first[0, 30:], other[0, 30:]) and torch.equal(first[1, 20:], other[1, 20:])
    assert not torch.equal(first[0, :30], other[0, :30]) and not torch.equal(first, redrawn)


def test_generation_with_a_cache_equals_the_default() -> None:
    """Our attention, outside of a packed forward pass, gets a cache, and queries that are fewer
    than the keys."""
    _, default, model = make_models("windows and soft caps")
    tokens_BL, _ = make_batch()
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "use_cache": True,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    generated = [m.generate(tokens_BL, **options) for m in (model, default)]
    assert generated[0].shape == (2, 60) and torch.equal(*generated)


def test_a_line_says_why_documents_get_rows(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_results", {})
    monkeypatch.setattr(packing, "missing_kernels", lambda config: ["causal_conv1d"])
    for _ in range(2):
        packing.choose_packing(make_config("convolution"))
    ours = [record.message.split(" (")[0] for record in log.records if record.name == "torchtitan"]
    assert ours == [
        "lfm2: each packed document gets a row, padded to the length of the longest",
        "lfm2: without causal_conv1d, its class computes with PyTorch's operations",
    ]
    assert "kernel: leak" in log.text


def test_a_model_without_a_tiny_clone_gets_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any) -> Any:
        raise ValueError("sizes do not fit")

    monkeypatch.setattr(tiny, "_results", {})
    monkeypatch.setattr(tiny, "tiny_config", refuse)
    chosen = packing.choose_packing(make_config("llama"))
    assert chosen.mode == "rows" and "sizes do not fit" in chosen.reason


def test_an_encoder_is_refused() -> None:
    with pytest.raises(UserError, match="bert: its tokens see later ones"):
        packing.choose_packing(transformers.AutoConfig.for_model("bert"))
    decoder = transformers.AutoConfig.for_model("bert", is_decoder=True)
    assert packing.choose_packing(decoder).mode == "kernel"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "state space with attention"])
def test_sharded_gradients_equal_one_process(case: str, workers: Workers) -> None:
    """Ranks have other documents, so under "rows" batches of other shapes, but call the model
    equally often."""
    workers.run(compare_sharded, case)


def compare_sharded(case: str) -> None:
    from torch.distributed.fsdp import fully_shard

    chosen, default, model = make_models(case)
    tokens_BL, attention = make_batch()
    for document in tokens_BL.flatten().split(LENGTHS):
        (loss_of(default(document[None]).logits) / 2).backward()  # FSDP averages over ranks
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module)
    fully_shard(model)
    rank = torch.distributed.get_rank()
    rows = attention.rows(rank, rank + 1)
    logits = chosen.gather(chosen.run(model, tokens_BL[rank : rank + 1], rows).logits, rows)
    loss_of(logits).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.full_tensor()
    assert_equal_gradients(model, default)

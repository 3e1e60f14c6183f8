"""A class of transformers as one of our models: the same loss and gradients as the class itself,
for any head, and refusals of models that do not train."""

import importlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.equivalence.workers import Workers
from torchtitan.components.losses import load_balance
from torchtitan.components.losses.load_balance import LoadBalancer
from torchtitan.components.losses.log_probs import token_log_probs
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.peft import LoRA
from torchtitan.distributed import initialize_weights
from torchtitan.models.pretrained import huggingface_model
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

from torchtitan.models.transformers import description  # noqa: E402
from torchtitan.models.transformers.balance import ClassBalance  # noqa: E402
from torchtitan.models.transformers.description import (  # noqa: E402
    TRUST_VARIABLE,
    transformers_config,
)
from torchtitan.models.transformers.model import TransformersModel  # noqa: E402
from torchtitan.models.transformers.tiny import tiny_config  # noqa: E402
from torchtitan.protocols.attention import AttentionMetadata  # noqa: E402

TOLERANCE = 1e-5
"""Of the largest element, in float32: the closed form of the loss sums in another order than the
class."""

TYPES = {
    "llama": {},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 5.0},
    "phi": {},  # a head with a bias
    "mamba": {},  # reads the type of the head's weights
    "mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "gemma3": {},  # of images and text
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def document_of(model_type: str, **changes: object) -> dict[str, object]:
    """The config.json of a tiny model."""
    config = tiny_config(transformers.AutoConfig.for_model(model_type, **changes))
    return json.loads(config.to_json_string(use_diff=False))


def model_of(document: dict[str, object], seed: int = 0) -> TransformersModel:
    with torch.device("meta"):
        model = TransformersModel.Config.of(document).build()
    initialize_weights(model.to_empty(device="cpu"), seed)
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_those_of_the_class(model_type: str) -> None:
    model = model_of(document_of(model_type, **TYPES[model_type]))
    tokens = torch.randint(8, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    with torch.device("meta"):
        reference = type(model.model)(model.model.config)
    reference.to_empty(device="cpu")
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    output = next(n for n, m in reference.named_modules() if m is reference.get_output_embeddings())
    state = {name.replace("head.output", output): tensor.clone() for name, tensor in state.items()}
    reference.load_state_dict(state, strict=False)
    reference.tie_weights()
    buffers = dict(model.model.named_buffers())
    for name, buffer in reference.named_buffers():
        buffer.data = buffers[name].clone()

    loss = (
        model(tokens, head=CrossEntropyLoss.Config().build(), labels_BL=labels)
        / (labels != IGNORE_INDEX).sum()
    )
    loss.backward()
    expected = reference(input_ids=tokens, labels=tokens).loss
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    torch.testing.assert_close(model(tokens), reference(input_ids=tokens).logits, rtol=0, atol=1e-5)
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    most = max(gradient.abs().max() for gradient in gradients.values() if gradient is not None)
    compared = 0
    for name, parameter in model.named_parameters():
        expected_gradient = gradients[name.removeprefix("model.").replace("head.output", output)]
        if parameter.requires_grad and expected_gradient is not None:
            difference = (parameter.grad - expected_gradient).abs().max()
            assert difference <= TOLERANCE * max(expected_gradient.abs().max(), most / 100), name
            compared += 1
    assert compared > 3


def test_the_auxiliary_loss_of_routers_counts() -> None:
    document = document_of("mixtral", **TYPES["mixtral"])
    tokens = torch.randint(8, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    head = CrossEntropyLoss.Config().build()
    models = [model_of({**document, "router_aux_loss_coef": factor}) for factor in (0.0, 0.5)]
    losses = [model(tokens, head=head, labels_BL=tokens) for model in models]
    # the loss of a perfect balance is 1 and more
    assert losses[1] - losses[0] > 0.5 * tokens.numel()


def auxiliary_gradients(
    tokens: torch.Tensor, attention: AttentionMetadata
) -> dict[str, torch.Tensor]:
    """Return the gradients of the routers' loss alone."""
    model = model_of(document_of("mixtral", **TYPES["mixtral"]))
    head = CrossEntropyLoss.Config().build()
    labels = tokens.where(tokens != 0, IGNORE_INDEX)
    loss = model(tokens, attention, head=head, labels_BL=labels)
    plain = model.eval()(tokens, attention, head=head, labels_BL=labels)
    (loss - plain).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", [3, 40])
@pytest.mark.parametrize("packed", [True, False])
def test_the_auxiliary_loss_leaves_out_padding(padding: int, packed: bool) -> None:
    documents = torch.randint(8, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(12), torch.arange(12)])[None]
    expected = auxiliary_gradients(
        documents.view(1, 24), AttentionMetadata.from_positions(positions)
    )
    tokens = F.pad(documents, (0, padding))
    n_tokens = torch.tensor([12, 12])
    attention = AttentionMetadata.of_rows(2, 12 + padding, n_tokens)
    if packed:
        positions = torch.cat([torch.arange(12), torch.arange(padding)]).expand(2, -1)
        attention = AttentionMetadata.from_positions(positions, n_tokens)
    gradients = auxiliary_gradients(tokens, attention)
    most = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=TOLERANCE * most.item())


def gradients_of_step(
    batches: list[tuple[torch.Tensor, AttentionMetadata]],
) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean loss over the labels of micro-batches, as a `LoadBalancer`
    drives a step."""
    model = model_of(document_of("mixtral", **TYPES["mixtral"]))
    balancer = LoadBalancer([model])
    n_tokens = sum(int((tokens != 0).sum()) for tokens, _ in batches)
    balancer.start_step(n_tokens, 1, torch.device("cpu"))
    head = CrossEntropyLoss.Config().build()

    def loss_of(tokens: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        return model(
            tokens, attention, head=head, labels_BL=tokens.where(tokens != 0, IGNORE_INDEX)
        )

    with balancer.measuring():
        for batch in batches:
            loss_of(*batch)
    for batch in batches:
        (loss_of(*batch) / n_tokens).backward()
    balancer.finish_step()
    metrics = balancer.watch()
    assert metrics["dropped_tokens/balance"] == 0 < metrics["router_entropy/balance"] <= 1
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ways_to_divide(
    documents: torch.Tensor,
) -> dict[str, list[tuple[torch.Tensor, AttentionMetadata]]]:
    """Return micro-batches of four documents of 12 tokens."""
    rows = AttentionMetadata.of_rows(2, 12)
    positions = torch.arange(12).repeat(4)[None]
    padded = F.pad(documents, (0, 9))
    return {
        "packed": [(documents.view(1, 48), AttentionMetadata.from_positions(positions))],
        "padded": [(padded, AttentionMetadata.of_rows(4, 21, torch.full((4,), 12)))],
        "accumulated": [(documents[:2], rows), (documents[2:], rows)],
        "one by one": [
            (document[None], AttentionMetadata.of_rows(1, 12)) for document in documents
        ],
    }


def test_the_auxiliary_loss_is_that_of_the_global_batch() -> None:
    """Equal to the class's own of the whole batch, however it is divided. The sums have other
    orders."""
    documents = torch.randint(8, 64, (4, 12), generator=torch.Generator().manual_seed(0))
    model = model_of(document_of("mixtral", **TYPES["mixtral"]))
    loss = model(documents, head=CrossEntropyLoss.Config().build(), labels_BL=documents)
    (loss / documents.numel()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    most = max(gradient.abs().max().item() for gradient in expected.values())
    for way, batches in ways_to_divide(documents).items():
        gradients = gradients_of_step(batches)
        for name, gradient in expected.items():
            torch.testing.assert_close(
                gradients[name], gradient, rtol=0, atol=1e-6 * most, msg=f"{way}: {name}"
            )


@pytest.mark.parametrize("dense_layers", [[], [0]])
def test_the_auxiliary_loss_of_stages_is_that_of_all_layers(dense_layers: list[int]) -> None:
    """Of two stages, as one rank has them in an interleaved schedule, also if one has no routers."""
    document = document_of("qwen3_moe", **TYPES["mixtral"], mlp_only_layers=dense_layers)
    tokens = torch.randint(8, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    attention = AttentionMetadata.of_rows(2, 12)
    whole = model_of(document)
    head = CrossEntropyLoss.Config().build()
    (whole(tokens, attention, head=head, labels_BL=tokens) / tokens.numel()).backward()
    names = whole.config.pipeline_modules()
    stages = [model_of(document) for _ in range(2)]
    for stage, kept in zip(stages, (names[:2], names[2:]), strict=True):
        stage.load_state_dict(whole.state_dict())
        stage.keep_modules(kept)

    def run() -> torch.Tensor:
        hidden = stages[0](tokens, attention)
        loss: torch.Tensor = stages[1](hidden, attention, head=head, labels_BL=tokens)
        return loss / tokens.numel()

    with pytest.raises(UserError, match="train with a LoadBalancer"):
        run()
    balancer = LoadBalancer(stages)
    balancer.start_step(tokens.numel(), 1, torch.device("cpu"))
    with balancer.measuring():
        run()
    run().backward()
    balancer.finish_step()
    assert balancer.watch()["dropped_tokens/balance"] == 0
    gradients = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-6, msg=name)


def compare_shards() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    documents = torch.randint(8, 64, (4, 12), generator=torch.Generator().manual_seed(0))
    expected = gradients_of_step([(documents, AttentionMetadata.of_rows(4, 12))])
    most = max(gradient.abs().max().item() for gradient in expected.values())
    model = model_of(document_of("mixtral", **TYPES["mixtral"]))
    balancer = LoadBalancer([model], mesh)
    fully_shard(model, mesh=mesh)
    mine = documents[2 * mesh.get_local_rank() :][:2]
    attention = AttentionMetadata.of_rows(2, 12)
    head = CrossEntropyLoss.Config().build()
    balancer.start_step(mine.numel(), 2, torch.device("cpu"))
    with balancer.measuring():
        model(mine, attention, head=head, labels_BL=mine)
    # FSDP averages over ranks.
    (model(mine, attention, head=head, labels_BL=mine) / mine.numel()).backward()
    balancer.finish_step()
    gradients = {
        name: parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6 * most, msg=name)


@pytest.mark.slow
def test_the_auxiliary_loss_of_shards_is_that_of_the_global_batch(workers: Workers) -> None:
    workers.run(compare_shards)


def test_an_auxiliary_loss_of_weight_zero_is_not_measured() -> None:
    """The trainer does not count before a step that has no loss of routers."""
    options = {**TYPES["mixtral"], "router_aux_loss_coef": 0.0}
    model = model_of(document_of("mixtral", **options))
    tokens = torch.randint(8, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    balancer = LoadBalancer([model])
    assert model.balance is not None and not balancer.needs_load
    balancer.start_step(tokens.numel(), 1, torch.device("cpu"))
    model(tokens, head=CrossEntropyLoss.Config().build(), labels_BL=tokens).backward()
    balancer.finish_step()
    assert balancer.watch()["dropped_tokens/balance"] == 0
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    plain = model_of(document_of("mixtral", **{**options, "output_router_logits": False}))
    plain(tokens, head=CrossEntropyLoss.Config().build(), labels_BL=tokens).backward()
    assert gradients.keys() == {name for name, p in plain.named_parameters() if p.grad is not None}
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(gradients[name], parameter.grad), name


def test_a_collapsed_layer_shows_in_the_load(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each layer uses another expert, so that all layers together are balanced."""
    monkeypatch.setattr(load_balance, "_STARVING_STEPS", 2)
    parts = [ClassBalance(4, 1, weight=0.5) for _ in range(2)]  # of two stages
    balancer = LoadBalancer([nn.ModuleDict({"balance": part}) for part in parts])
    logits = 9 * torch.eye(4).repeat_interleave(10, dim=0).view(4, 10, 4)
    has_token_N = torch.arange(10) < 8
    hidden_ND = torch.zeros(10, 2, requires_grad=True)

    def run() -> list[Tensor]:
        of_parts = zip(parts, (logits[:1], logits[1:]), strict=True)
        return [part(hidden_ND, tuple(layers), has_token_N) for part, layers in of_parts]

    for _ in range(2):
        balancer.start_step(8, 1, torch.device("cpu"))
        with balancer.measuring():
            run()
        torch.stack(run()).sum().backward()
        balancer.finish_step()
        for part in parts:
            assert part.batch_counts_E is not None
            assert part.batch_counts_E.tolist() == [8] * 4, "the loss is the class's, of all layers"
    values = balancer.watch()
    assert values["expert_load"] == values["expert_load/balance"] == 4
    assert values["dropped_tokens/balance"] == 0
    assert "balance expert 3 of a layer" in caplog.text


def test_log_probabilities_have_no_auxiliary_loss() -> None:
    model = model_of(document_of("mixtral", **TYPES["mixtral"]))
    tokens = torch.randint(8, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    in_training = model(tokens, head=token_log_probs, labels_BL=tokens)
    torch.testing.assert_close(
        in_training, model.eval()(tokens, head=token_log_probs, labels_BL=tokens)
    )


def test_another_formula_of_the_auxiliary_loss_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    monkeypatch.setattr(
        module, "load_balancing_loss_func", lambda logits, *sizes: 1.01 * torch.cat(logits).sum()
    )
    model = model_of(document_of("mixtral", output_router_logits=True, router_aux_loss_coef=0.25))
    assert model.balance is None
    message = (
        "MixtralForCausalLM computes the loss of its routers in its own way, for each micro-batch "
        "of a rank"
    )
    assert message in caplog.text


def test_a_batch_of_padding_has_a_finite_loss() -> None:
    attention = AttentionMetadata.of_rows(2, 12, torch.tensor([0, 0]))
    gradients = auxiliary_gradients(torch.zeros(2, 12, dtype=torch.long), attention)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    document = document_of("mamba")
    first, again, other = model_of(document), model_of(document), model_of(document, seed=1)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    differ = [
        not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    ]
    assert all(same) and any(differ)
    assert all(tensor.isfinite().all() for tensor in first.state_dict().values())


def test_vision_is_frozen() -> None:
    model = model_of(document_of("gemma3"))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".language_model." in name}
    assert any("vision_tower" in name for name in model.blocks())


def folder_with(folder: Path, **document: object) -> Path:
    (folder / "config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"model_type": "llamaa"}, "did you mean 'llama'"),
        ({"model_type": "next_year", "transformers_version": "6.1"}, "written by transformers 6.1"),
        ({"model_type": "vit"}, "no class in transformers that predicts the next token"),
        ({"model_type": "bart"}, "encoder-decoder"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "modeling_own.py",
        ),
        ({"model_type": "cohere", "num_hidden_layers": "two"}, "transformers refuses it"),
        # A section gives sizes; without it, the class would take its defaults.
        (
            {"model_type": "aya_vision", "hidden_size": 128, "eos_token_id": 7},
            "AyaVisionConfig reads hidden_size 128 from a section .* none of",
        ),
        # The section of the images does not give the sizes of the language model.
        (
            {"model_type": "kimi_k25", "hidden_size": 128, "vision_config": {"patch_size": 7}},
            "reads hidden_size 128 from a section .* none of text_config",
        ),
        (
            {
                "model_type": "step3p7",
                "num_hidden_layers": 2,
                "layer_types": ["full_attention"] * 2,
            },
            "Step3p7Config reads num_hidden_layers 2 from a section",
        ),
    ],
)
def test_what_does_not_train_is_refused(
    tmp_path: Path, document: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        spec, _ = huggingface_model(folder_with(tmp_path, **document))
        with torch.device("meta"):
            spec.model.build()
    assert "\n" not in str(error.value)


def test_a_configuration_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are new: a change of one does not reach the next."""
    document = json.loads(transformers.LlamaConfig(num_hidden_layers=3).to_json_string())
    first = transformers_config(document, vocab_size=99)
    first.num_hidden_layers = 1
    read = mock.Mock()
    monkeypatch.setattr(transformers.LlamaConfig, "from_dict", read)
    again = transformers_config(document)
    assert (again.num_hidden_layers, again.vocab_size) == (3, 32000)
    read.assert_not_called()
    transformers_config(document | {"num_hidden_layers": 2})
    read.assert_called_once()
    for n_layers in range(4, 40):
        transformers_config(document | {"num_hidden_layers": n_layers})
    assert len(description._read_configs) == description._MOST_READ


def test_an_own_family_comes_first(tmp_path: Path) -> None:
    import torchtitan.models.transformers as any_class

    document = document_of("qwen3")
    folder = folder_with(tmp_path, **document)
    assert huggingface_model(folder)[0].name == "qwen3"
    assert huggingface_model(folder, any_class)[0].name == "transformers"


def test_code_in_the_folder_is_executed_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    code += "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    (tmp_path / "modeling_own.py").write_text(code)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    folder = folder_with(
        tmp_path, **{**document_of("llama"), "model_type": "own", "auto_map": auto_map}
    )
    with pytest.raises(UserError, match=TRUST_VARIABLE):
        huggingface_model(folder)
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    spec, _ = huggingface_model(folder)
    with torch.device("meta"):
        assert type(spec.model.build().model).__name__ == "Own"


def test_a_configuration_in_a_checkpoint_executes_no_code(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    document = {**document_of("llama"), "auto_map": auto_map, "_name_or_path": str(tmp_path)}
    saved = {**TransformersModel.Config.of(document_of("llama")).to_dict(), "document": document}
    with pytest.raises(UserError, match=TRUST_VARIABLE):
        with torch.device("meta"):
            TransformersModel.Config.from_dict(saved).build()
    assert not (tmp_path / "ran").exists()


def test_vision_is_not_converted() -> None:
    with torch.device("meta"):
        model = TransformersModel.Config.of(document_of("gemma3")).build()
    LoRA.Config(include=["_proj"]).build().convert(model)
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert adapted and all(".language_model." in name for name in adapted)


def test_buffers_keep_their_types() -> None:
    with torch.device("meta"):
        model = TransformersModel.Config.of(document_of("deepseek_v3")).build().to(torch.bfloat16)
    types = {
        name: buffer.dtype
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    assert set(types.values()) == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_code_of_another_repository_is_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    auto_map = {
        "AutoConfig": "other/code--own.OwnConfig",
        "AutoModelForCausalLM": "other/code--own.Own",
    }
    with pytest.raises(UserError, match="other/code--own.py"):
        huggingface_model(folder_with(tmp_path, model_type="own", auto_map=auto_map))


def test_layers_are_not_left_out_at_random() -> None:
    with pytest.raises(UserError, match="layerdrop"):
        TransformersModel.Config.of(document_of("opt", layerdrop=0.1)).validate()

"""Pipeline stages of classes: what a trial shows, what it refuses, and the parts of a stage."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models.transformers.model_types import tiny_model  # noqa: E402
from torchtitan.distributed.pipeline import take_stage  # noqa: E402
from torchtitan.models.transformers import layouts, stages  # noqa: E402
from torchtitan.tools.errors import UserError  # noqa: E402


@pytest.mark.parametrize(
    ("model_type", "first", "last"),
    [
        ("llama", "model.model.embed_tokens", {"model.model.norm"}),
        ("gpt2", "model.transformer.wte", {"model.transformer.ln_f"}),
        ("lfm2", "model.model.embed_tokens", {"model.model.embedding_norm"}),
        ("gemma3", "model.model.language_model.embed_tokens", {"model.model.language_model.norm"}),
    ],
)
def test_a_trial_shows_what_can_be_divided(model_type: str, first: str, last: set[str]) -> None:
    config = tiny_model(model_type)
    assert config.try_stages() == (last, "")
    names = config.pipeline_modules()
    assert names[0] == first and names[-1] == "head" and len(names) >= 4
    with torch.device("meta"):
        model = config.build()
    assert all(name in model.blocks() for name in names[1:-1])


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zamba2", "stages changed its logits"),  # blocks read the embedding
        ("gemma3n_text", r"not \(tokens, width\)"),  # several streams
        ("mamba", "wider than its weights"),  # in float32
    ],
)
def test_what_a_trial_does_not_show_is_refused(model_type: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"does not divide .*ForCausalLM: .*{reason}"):
        tiny_model(model_type).pipeline_modules()


def test_images_and_other_losses_of_routers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    images = tiny_model("gemma3")
    images.reads_images = True
    with pytest.raises(UserError, match="it reads images"):
        images.pipeline_modules()
    with_loss = tiny_model("mixtral", output_router_logits=True)
    assert with_loss.pipeline_modules()[-1] == "head"
    monkeypatch.setattr(layouts, "has_formula", lambda config: False)
    with pytest.raises(UserError, match="loss of its routers in its own way.*output_router_logits"):
        with_loss.pipeline_modules()


def _scaled(self: Any, *_: object, **__: object) -> torch.Tensor:
    return self.states.received * 1.01


def _detached(self: Any, *_: object, **__: object) -> torch.Tensor:
    return self.states.received.detach()


@pytest.mark.parametrize(
    ("seed", "mistake", "reason"), [(1, _scaled, "its logits"), (2, _detached, "the gradient of")]
)
def test_a_mistake_between_stages_is_found(
    seed: int, mistake: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_model("qwen3", max_position_embeddings=128 + seed)  # not in the cache of trials
    monkeypatch.setattr(stages.Entry, "forward", mistake)
    assert reason in config.try_stages()[1]


def test_a_stage_has_its_parameters_alone() -> None:
    config = tiny_model("qwen3", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with torch.device("meta"):
        model = config.build()
    names = config.pipeline_modules()
    parts = [take_stage(model, part) for part in (names[:2], names[2:3], names[3:])]
    owned = [set(part.state_dict()) for part in parts]
    assert sum(map(len, owned)) == len(set.union(*owned))
    assert set.union(*owned) == set(model.state_dict())
    assert [list(part.blocks()) for part in parts] == [[name] for name in names[1:-1]]
    assert parts[0].head is None and parts[1].head is None and "model.model.norm.weight" in owned[2]
    with pytest.raises(UserError, match="each stage needs a block"):
        take_stage(model, names[-1:])


def test_a_tied_embedding_is_in_two_stages() -> None:
    config = tiny_model("cohere2")
    assert config.shared_modules == ["model.model.embed_tokens"]
    assert not tiny_model("qwen3", tie_word_embeddings=False).shared_modules

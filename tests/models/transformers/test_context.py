"""Parts of sequences for classes: what a trial shows, and what it refuses."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models.transformers.model_types import tiny_model  # noqa: E402
from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.transformers import context, packing  # noqa: E402
from torchtitan.models.transformers.tiny import random_clone  # noqa: E402
from torchtitan.tools.errors import UserError  # noqa: E402


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "deepseek_v3", "qwen3_moe", "gemma3"])
def test_a_trial_shows_that_tokens_can_be_divided(model_type: str) -> None:
    assert "context_parallel_degree" not in tiny_model(model_type).unsupported_parallelisms()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_oss", "its attention is not ours: documents are packed in masks"),  # sinks
        ("mamba", "its attention is not ours: documents are packed in rows"),
    ],
)
def test_other_attention_is_refused(model_type: str, reason: str) -> None:
    dims = ParallelDims.from_config(ParallelismConfig(context_parallel_degree=2), 2)
    with pytest.raises(UserError, match=f"context_parallel_degree 2 must be 1 .*{reason}"):
        dims.check_fits(tiny_model(model_type), 64)


def test_images_are_refused() -> None:
    config = tiny_model("gemma3")
    config.reads_images = True
    assert config.unsupported_parallelisms()["context_parallel_degree"] == "it reads images"


def _own_keys(self: Any, q: Any, k: Any, v: Any, attention: Any, *, products: Any) -> Any:
    """Attend to the keys of the own part, as without an exchange."""
    results = []
    for one, part in zip(range(2), self.parts, strict=True):
        queries, keys, values = (x.chunk(2)[one] for x in (q, k, v))
        own = context.replace(part, key_places_S=part.query_places_L, kernel="dense")
        own = context.with_kernel(own, device=q.device, dtype=q.dtype, head_dim=64, static=False)
        results.append(products(queries, keys, values, own))
    return torch.cat(results)


def test_missing_keys_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context._InTwo, "forward", _own_keys)
    config = tiny_model("qwen3", max_position_embeddings=131)  # not in the cache of trials
    assert "changed its logits" in config.unsupported_parallelisms()["context_parallel_degree"]


_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
_LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("phi3", _LONGROPE),
        ("llama", _DYNAMIC),
        ("gemma3_text", {"full_attention": _DYNAMIC, "sliding_attention": _PLAIN}),
    ],
)
def test_frequencies_of_the_largest_position_are_refused(
    model_type: str, rope: dict[str, Any]
) -> None:
    """A trial has none of the lengths for which they change."""
    config = tiny_model(model_type, rope_parameters=rope)
    reason = config.unsupported_parallelisms()["context_parallel_degree"]
    assert "depends on the largest position" in reason


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("bert", "attention_probs_dropout_prob"), ("seed_oss", "attention_dropout")],
)
def test_dropout_attends_to_the_keys_of_all_parts(
    model_type: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a probability so small that no value is left out, results are those without."""
    without = {name: 0.0 for name in ("hidden_dropout_prob", "residual_dropout", "dropout")}
    config = tiny_model(model_type, **without, **{key: 1e-30})
    monkeypatch.setattr(context, "random_clone", lambda *args: random_clone(*args).train())
    calls = []
    called = packing._with_dropout
    monkeypatch.setattr(
        packing, "_with_dropout", lambda *args, **kw: (calls.append(kw), called(*args, **kw))[1]
    )
    assert "context_parallel_degree" not in config.unsupported_parallelisms()
    assert calls


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("attention_dropout", None),
        ("residual_dropout", "residual_dropout 0.1 would change the same hidden states"),
    ],
)
def test_dropout_of_states_that_ranks_share_is_refused(key: str, reason: str | None) -> None:
    without = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    unsupported = tiny_model("seed_oss", **{**without, key: 0.1}).unsupported_parallelisms()
    assert reason is None or reason in unsupported["tensor_parallel_degree"]
    assert (reason is None) == ("tensor_parallel_degree" not in unsupported)

"""Classes of transformers in two processes train as in one, in the layouts that a trial allows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.equivalence.runs import (  # noqa: E402
    TOLERANCE,
    Outcome,
    UnitVariance,
    compare,
    record_run,
)
from tests.equivalence.workers import Workers  # noqa: E402
from tests.models.transformers.model_types import decoder_config  # noqa: E402
from tests.transformers_matrix.mechanisms import RUN, write_model  # noqa: E402
from tests.transformers_matrix.trial import without_dropout  # noqa: E402
from torchtitan.components.losses.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, initialize_weights  # noqa: E402
from torchtitan.distributed.tensor_parallel import apply_tensor_parallel  # noqa: E402
from torchtitan.distributed.whole_tensors import whole  # noqa: E402
from torchtitan.models.transformers.model import TransformersModel  # noqa: E402
from torchtitan.models.transformers.sharding import class_plan  # noqa: E402
from torchtitan.models.transformers.tiny import tiny_config  # noqa: E402
from torchtitan.tools.torch_private import allocate  # noqa: E402

STEPS = 2
OPTIONS = {
    **RUN,
    "training__steps": STEPS,
    "validator__freq": STEPS,
    "checkpoint__enable": False,
    "checkpoint__interval": 100,
}

CP2 = {"parallelism__context_parallel_degree": 2}
EP2 = {"parallelism__expert_parallel_degree": 2}
PP2 = {"parallelism__pipeline_parallel_degree": 2}

TP2 = {"parallelism__tensor_parallel_degree": 2}

ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""A loss so large that a wrong scale changes the run."""

LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}, EP2),
    "the loss of routers": ("mixtral", ROUTERS, EP2),
    "experts with biases, transposed": ("gpt_oss", {}, EP2),
    "experts among delta nets": ("qwen3_next", {}, EP2),
    "parts of tokens, windows": ("gemma3_text", {}, CP2),
    "parts of tokens, latent attention": ("deepseek_v3", {}, CP2 | EP2),
    # so small that no value is left out, in the attention that has dropout
    "parts of tokens, dropout of attention": ("gpt2", {"attn_pdrop": 1e-30}, CP2),
    "parts of tokens, the loss of routers": ("mixtral", ROUTERS, CP2 | EP2),
    "tensors, experts on each rank": ("qwen3_moe", {}, TP2),
    "tensors, divided experts": ("glm4_moe", {}, TP2 | EP2),
    "tensors, a shared expert with a gate": ("qwen2_moe", {}, TP2),
    "tensors, the loss of routers": ("mixtral", ROUTERS, TP2 | EP2),
    "stages of experts": ("glm4_moe", {}, PP2),
    "stages, the loss of routers": ("mixtral", ROUTERS, PP2),
    "stages, the loss of routers above a dense layer": (
        "qwen3_moe",
        {**ROUTERS, "mlp_only_layers": [0]},
        PP2,
    ),
    "stages of learned positions": ("gpt2", {}, PP2),
    "stages of windows, tied": ("gemma2", {}, PP2),
}
"""Name → type, changes of its config.json, and options."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(2, runs_per_process=len(LAYOUTS)) as workers:
        yield workers


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_train_as_one(name: str, tmp_path: Path, pair: Workers) -> None:
    model_type, changes, layout = LAYOUTS[name]
    write_model(model_type, tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    options = {**OPTIONS, "hf_assets_path": tmp_path / "model"}
    data = tmp_path / "model/documents.jsonl"
    options |= {"dataloader__dataset": data, "validator__dataset": data}
    for folder in ("alone", "divided"):
        (tmp_path / folder).mkdir()
    record_run(tmp_path / "alone", options)
    pair.run(record_run, tmp_path / "divided", options | layout)
    degree = layout.get("parallelism__pipeline_parallel_degree", 1)
    expected = Outcome.read(tmp_path / "alone", processes=1, pipeline_degree=1)
    tied = [
        weight
        for weight in expected.weights
        if weight.endswith(("embed_tokens.weight", "wte.weight"))
    ]
    is_tied = degree > 1 and "head.output.weight" not in expected.weights
    found = Outcome.read(tmp_path / "divided", 2, degree, tied if is_tied else ())
    differences = compare(found, expected)
    assert differences.agree, str(differences)


WITH_EXPERTS = (
    "aria_text",
    "cohere2_moe",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4v_moe",
    "hy_v3",
    "kolibri1",
    "laguna",
    "mellum",
    "minimax_m2",
    "minimax_m3_vl_text",
    "olmoe",
    "solar_open",
)
"""Types with experts whose plan splits the other layers."""


def compare_tensor_parallel(documents: dict[str, dict[str, Any]]) -> None:
    dims = ParallelDims.from_config(ParallelismConfig(tensor_parallel_degree=2), 2)
    mesh = dims.build_mesh("cpu")
    assert mesh is not None
    tokens_BL = torch.randint(8, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    for model_type, document in documents.items():
        config = TransformersModel.Config.of(document)
        results = []
        for is_divided in (False, True):
            with torch.device("meta"):
                model = config.build()
            UnitVariance.Config().build().convert(model)
            if is_divided:
                plan, reason = class_plan(config.document)
                assert plan.tensor and not reason, (model_type, reason)
                apply_tensor_parallel(model, mesh["tp"], plan, disable_loss_parallel=True)
            allocate(model, torch.device("cpu"))
            initialize_weights(model, 0)
            loss = model(tokens_BL, head=CrossEntropyLoss.Config().build(), labels_BL=tokens_BL)
            loss.backward()
            gradients = {
                name: whole(parameter.grad)
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            results.append((whole(loss.detach()), gradients))
        (expected, gradients), (found, others) = results
        assert abs(found - expected) <= TOLERANCE * expected, model_type
        most = max(gradient.abs().max() for gradient in gradients.values())
        for name, gradient in gradients.items():
            scale = max(gradient.abs().max(), most / 100)
            assert (others[name] - gradient).abs().max() <= TOLERANCE * scale, (model_type, name)


@pytest.mark.slow
def test_tensor_parallel_classes_with_experts_are_equal(pair: Workers) -> None:
    documents = {
        name: json.loads(tiny_config(decoder_config(name)).to_json_string(use_diff=False))
        for name in WITH_EXPERTS
    }
    pair.run(compare_tensor_parallel, {name: without_dropout(d) for name, d in documents.items()})

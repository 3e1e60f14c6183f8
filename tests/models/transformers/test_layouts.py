"""Classes of transformers in two processes train as in one, in the layouts that a trial allows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.equivalence.runs import Outcome, compare, record_run  # noqa: E402
from tests.equivalence.workers import Workers  # noqa: E402
from tests.transformers_matrix.mechanisms import RUN, write_model  # noqa: E402

STEPS = 2
OPTIONS = {
    **RUN,
    "training__steps": STEPS,
    "validator__freq": STEPS,
    "checkpoint__enable": False,
    "checkpoint__interval": 100,
}

EP2 = {"parallelism__expert_parallel_degree": 2}
PP2 = {"parallelism__pipeline_parallel_degree": 2}

ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""A loss so large that a wrong scale changes the run."""

LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}, EP2),
    "the loss of routers": ("mixtral", ROUTERS, EP2),
    "experts with biases, transposed": ("gpt_oss", {}, EP2),
    "experts among delta nets": ("qwen3_next", {}, EP2),
    "stages of experts": ("glm4_moe", {}, PP2),
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

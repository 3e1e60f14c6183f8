"""Statistics of routers count tokens of documents: the same rows give the same numbers in any form
and layout."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.processes import run_processes
from tests.training import run, tiny_config
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.data.pretraining.windows import collate, pack, padding_sample
from torchtitan.components.losses.load_balance import LoadBalancer
from torchtitan.models.common.moe.router import Router, RoutingConfig
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.experts import PenaltyConfig
from torchtitan.trainer.load_balance import count_tokens

LENGTHS = (11, 64, 5, 90, 33, 120, 47, 20)
"""Words of the rows, a token or more each."""

TOLERANCE = 1e-6
"""Relative: float32 sums over the same tokens, in another order."""

PACKED: dict[str, Any] = {"training__seq_len": 1024, "training__local_batch_size": 1}
FORMS: dict[str, dict[str, Any]] = {
    "padded": {"training__seq_len": 256, "training__local_batch_size": 8},
    "padded further": {"training__seq_len": 384, "training__local_batch_size": 8},
    "one by one": {
        "training__seq_len": 256,
        "training__local_batch_size": 1,
        "training__global_batch_size": 8,
    },
    "two by two": {
        "training__seq_len": 256,
        "training__local_batch_size": 2,
        "training__global_batch_size": 8,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    name: {"module": name, **options}
    for name, options in {
        "qwen3_moe": {},
        "glm4_moe": {"model__moe__bias_rate": 0.04},
        "mixtral": {},
        "llama4": {"model__sliding_window": 12},
        "gpt_oss": {},
        "gemma4": {"config": "gemma4_moe_debugmodel"},
        "qwen3_5": {
            "config": "qwen3_5_moe_debugmodel",
            "model__norm_eps": 1e-2,
            "model__n_layers": 4,
        },
        "deepseek_v3": {"model__moe__bias_rate": 0.05, "model__n_mtp_modules": 2},
    }.items()
}
PENALTIES = {
    "model__moe__penalties__batch_loss": 1.0,
    "model__moe__penalties__sequence_loss": 0.5,
    "model__moe__penalties__z_loss": 0.1,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = "once upon a time there was a little girl who had red ball and played with dog".split()
    texts = [" ".join(words[(i * n) % len(words)] for i in range(n)) for n in LENGTHS]
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def numbers(folder: Path, rows: Path, *, packed: bool = False, **options: Any) -> dict[str, float]:
    """Take a step over all rows; on rank 0, return what it logs of its gradients and routers."""
    options = {"training__steps": 1, "lr_scheduler__warmup_steps": 0, **PENALTIES, **options}
    config = tiny_config(folder, **options)
    config.dataloader = SFTDataLoader.Config(
        dataset=[str(rows)], packing="ffd" if packed else "none"
    )
    run(config)
    return logged(folder) if int(os.environ.get("RANK", 0)) == 0 else {}


def logged(folder: Path) -> dict[str, float]:
    """Return the numbers of a run of one step."""
    (line,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = (
        "loss",
        "grad_norm",
        "expert_load",
        "router_entropy",
        "selection_bias",
        "dropped_tokens",
    )
    return {key: value for key, value in line.items() if key.partition("/")[0] in names}


@pytest.mark.parametrize(
    "family",
    [
        name if name == "qwen3_moe" else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_padding_changes_no_number(family: str, tmp_path: Path, rows: Path) -> None:
    options = FAMILIES[family]
    expected = numbers(tmp_path / "packed", rows, packed=True, **options, **PACKED)
    assert expected["expert_load"] > 1
    # Modules of multi-token prediction, layers 2 and 3, have nothing to predict from the last
    # tokens of a document.
    assert expected["dropped_tokens/layers.1"] == 0
    for name, form in FORMS.items():
        found = numbers(tmp_path / name, rows, **options, **form)
        assert found == pytest.approx(expected, rel=TOLERANCE), name


HALVES: dict[str, Any] = {"training__seq_len": 256, "training__local_batch_size": 4}
WHOLE: dict[str, Any] = {"training__seq_len": 256, "training__local_batch_size": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": HALVES,
    "experts": {**HALVES, "parallelism__expert_parallel_degree": 2},
    "context": {**WHOLE, "parallelism__context_parallel_degree": 2},
    "tensor": {**WHOLE, "parallelism__tensor_parallel_degree": 2},
    "pipeline": {
        **WHOLE,
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 2,
    },
    "recomputation": {**HALVES, "activation_checkpoint__mode": "full"},
    "accumulation": {**HALVES, "training__local_batch_size": 1, "training__global_batch_size": 8},
}


def measure_layouts(folder: Path, rows: Path, options: dict[str, Any]) -> None:
    for name, layout in LAYOUTS.items():
        numbers(folder / name, rows, **options, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_padding_changes_no_number_in_any_layout(family: str, tmp_path: Path, rows: Path) -> None:
    options = FAMILIES[family]
    expected = numbers(tmp_path / "packed", rows, packed=True, **options, **PACKED)
    run_processes(measure_layouts, 2, tmp_path, rows, options)
    for name in LAYOUTS:
        assert logged(tmp_path / name) == pytest.approx(expected, rel=TOLERANCE), name


@pytest.mark.parametrize("document_mask", [True, False])
def test_windows_of_padding_and_short_windows_do_not_count(document_mask: bool) -> None:
    """As at the end of pre-training data."""
    tokens = np.arange(1, 8)
    short = pack(tokens, np.array([3]), 10, document_mask=document_mask), (0, 1)
    batch = collate([short, padding_sample(10, document_mask=document_mask)])
    assert count_tokens(batch) == 6
    attention = batch["attention"].with_documents(torch.device("cpu"))
    numbers = [0, 0, 0, 1, 1, 1] if document_mask else [0] * 6
    assert attention.documents.of_token_BL[0, :6].tolist() == numbers
    assert attention.documents.has_token_BL.tolist() == [[True] * 6 + [False] * 4, [False] * 10]
    whole = pack(np.arange(1, 12), np.array([3]), 10, document_mask=document_mask), (0, 1)
    assert count_tokens(collate([whole])) == 10
    assert attention.documents.before_last(2).has_token_BL[0, :6].tolist() == (
        [True, False, False] * 2 if document_mask else [True] * 4 + [False] * 2
    )


def test_a_router_counts_tokens_of_documents() -> None:
    """The same totals and gradients with and without padding that is full of large values."""
    x_BLD = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0))
    padded_BLD = torch.full((2, 12, 16), 100.0)
    padded_BLD[0, :10] = x_BLD
    penalties = PenaltyConfig(sequence_loss=0.5, z_loss=0.1)
    results = []
    for inputs, n_tokens in ((x_BLD, None), (padded_BLD, torch.tensor([10, 0]))):
        router = Router(
            RoutingConfig(n_experts=6, top_k=2, penalties=penalties), dim=16, init_std=1.0
        )
        with torch.no_grad():
            router.weight.copy_(torch.randn(6, 16, generator=torch.Generator().manual_seed(1)))
        balancer = LoadBalancer([router])
        balancer.start_step(10, 1, torch.device("cpu"))
        attention = AttentionMetadata.of_rows(*inputs.shape[:2], n_tokens).with_documents(
            inputs.device
        )
        (0.0 * router(inputs, attention.documents)[0]).sum().backward()
        results.append((router.totals, router.weight.grad))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0][:-1].sum() == 20
    torch.testing.assert_close(results[1][1], results[0][1], rtol=TOLERANCE, atol=TOLERANCE)

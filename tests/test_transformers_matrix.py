"""Types of transformers train as their classes do; mistakes of the back end are detected."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.equivalence.runs import Outcome, compare  # noqa: E402
from tests.models_page import TABLE  # noqa: E402
from tests.tables import Row as TableRow  # noqa: E402
from tests.tables import markers, stored_rows, write_docs  # noqa: E402
from tests.transformers_matrix import trial  # noqa: E402
from tests.transformers_matrix.__main__ import (  # noqa: E402
    COLUMNS,
    TYPES,
    choose_types,
    images_of,
    mechanism_cells,
    merge,
    run,
)
from tests.transformers_matrix.mechanisms import (  # noqa: E402
    MECHANISMS,
    MechanismRow,
    changed,
    compare_packed,
    run_mechanisms,
    write_model,
)
from tests.transformers_matrix.trial import run_trial  # noqa: E402
from torchtitan.models.transformers import model as model_module  # noqa: E402
from torchtitan.models.transformers import packing  # noqa: E402
from torchtitan.models.transformers.model import OutputPlace, TransformersModel  # noqa: E402

KINDS = {
    "llama": "dense",
    "gemma2": "windows, soft caps, tied embeddings",
    "granitemoe": "experts, multipliers",
    "deepseek_v3": "latent attention",
    "mamba": "states",
    "falcon_h1": "states and attention, an infinite number in config.json, buffers that the whole "
    "model fills",
    "qwen3_next": "delta nets",
    "lfm2": "convolutions",
    "qwen2_vl": "images and text",
    "bert": "a tied head with a bias",
    "zamba": "layers with the same weights",
    "inkling2_text": "a head of its own",
    "apertus": "initial values that only the constructor gives",
}


@pytest.mark.parametrize("model_type", KINDS)
def test_kinds_are_equal_to_their_class(model_type: str) -> None:
    row = run_trial(model_type)
    assert (row.outcome, row.details) == ("equal", "")


@pytest.mark.long
def test_all_types_are_equal_or_as_the_page_says() -> None:
    page = TABLE.read_text().splitlines()
    for row in run(TYPES):
        assert row.outcome in ("equal", "refused") or any(
            line.startswith(f"| {row.model_type} |") and row.outcome in line for line in page
        ), row


def test_the_page_has_every_type() -> None:
    stored = stored_rows(TABLE, "matrix")
    assert list(stored)[1:] == TYPES
    column = COLUMNS.index("images")
    assert {name: stored[name][column] for name in TYPES} == {
        name: images_of(name) for name in TYPES
    }
    assert list(stored_rows(TABLE, "mechanisms"))[1:] == list(MECHANISMS)
    assert len(MECHANISMS) <= 25


@pytest.mark.slow
def test_mechanisms_are_equal_in_two_processes_resumed_and_packed() -> None:
    rows = list(run_mechanisms(["gpt_oss", "mamba", "qwen3_next"]))
    assert [row.problems for row in rows] == [[], [], []]
    assert [row.packing for row in rows] == ["masks", "rows", "rows"]


# --- mistakes are detected
# --------------------------------------------------------------------------------------------


def _unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "load_weights", lambda *_: None)


def _shifted_states(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = OutputPlace.forward
    monkeypatch.setattr(
        OutputPlace, "forward", lambda self, hidden_BLD: forward(self, hidden_BLD * 1.001)
    )


def _frozen_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(model: Any, trained: list[str]) -> None:
        model.get_input_embeddings().requires_grad_(False)

    monkeypatch.setattr(model_module, "train_parts", freeze)


def _wrong_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(model: TransformersModel, seed: int, **options: Any) -> None:
        plain(model, seed, **options)
        for buffer in model.buffers():
            buffer.mul_(0.9)

    plain = trial.initialize_weights
    monkeypatch.setattr(trial, "initialize_weights", initialize)


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (_unloaded, "other values when resumed: "),
        (_shifted_states, "in float64"),
        (_frozen_embedding, "frozen, but text needs it: model.embed_tokens.weight"),
        (_wrong_buffers, "in float64"),
    ],
)
def test_mistakes_are_found(
    mistake: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    row = run_trial("qwen3")
    assert row.outcome == "different" and found in row.details


def test_a_leak_between_packed_documents_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("gpt_oss", tmp_path / "model")
    mode, leak = compare_packed(tmp_path / "model")
    assert mode == "masks" and leak < 1e-5
    monkeypatch.setattr(packing, "_remap", lambda mask_function, *_, **__: mask_function)
    assert compare_packed(tmp_path / "model")[1] > 1e-3  # the mode, found before, stays


def test_differences_of_mechanisms_are_named() -> None:
    outcome = Outcome([2.0, 1.0], [0.5, 0.5], [1.5], {"weight": torch.ones(2)})
    other = replace(
        outcome, grad_norms=[0.5, 0.5 + 1e-9], weights={"weight": torch.tensor([1.0, 1.01])}
    )
    assert list(changed(outcome, outcome)) == [] and list(changed(other, outcome)) == [
        "grad norms",
        "weights",
    ]
    row = MechanismRow("llama", 1.0, "kernel", 1e-4, compare(other, outcome), "weights")
    kinds = ["packed documents differ by 1.0e-04", "FSDP differs", "resumed: other weights"]
    assert [
        problem.split(":")[0] if "FSDP" in problem else problem for problem in row.problems
    ] == kinds
    assert "equal" not in mechanism_cells(row)
    assert not MechanismRow("llama", 1.0, "kernel", 0.0, compare(outcome, outcome)).problems


def test_refusals_and_exceptions_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run_trial("blip-2")
    assert refused.outcome == "refused" and "needs an image" in refused.details
    monkeypatch.setattr(trial, "_our_results", None)
    assert run_trial("llama").outcome == "not trained"


def test_a_table_is_written_in_parts(tmp_path: Path) -> None:
    assert choose_types("^qwen2", "2/2") == choose_types("^qwen2")[1::2]
    page = tmp_path / "page.md"
    page.write_text("\n".join(markers("matrix")))
    for verdict, names in {
        "equal": ("llama", "bert"),
        "refused: it needs images": ("bert", "blip"),
    }.items():
        write_docs(
            page,
            "matrix",
            merge(
                page,
                [TableRow((name, "Class", "rows", "no", "own", "", verdict)) for name in names],
            ),
        )
    text = page.read_text()
    assert "has 3 types. 3 (100.0%) build; of these, 1 (33.3%) train equally, 2 are refused" in text
    assert [line.split()[1] for line in text.splitlines() if "| Class |" in line] == [
        "bert",
        "blip",
        "llama",
    ]

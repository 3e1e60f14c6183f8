"""Every parallel layout trains like a single process; mistakes in training are detected."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.equivalence.__main__ import COLUMNS, cells, choose_layouts, merge, parse_arguments
from tests.equivalence.layouts import PROBLEM, Layout, all_layouts
from tests.equivalence.matrix import Matrix, Row
from tests.equivalence.random_layouts import draw_layouts
from tests.equivalence.runs import (
    TOLERANCE,
    Differences,
    InconsistentRanks,
    Outcome,
    compare,
    merge_weights,
)
from tests.tables import Row as TableRow
from tests.tables import as_markdown, markers, write_docs
from tests.training import ABSENT, RaggedDataLoader
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.distributed import ParallelDims, expert_parallel
from torchtitan.distributed.initialize import canonical_name
from torchtitan.experiments.flow_matching.flux import ClassTextTrainer
from torchtitan.trainer import Trainer

THREE_STEPS = {"training__steps": 3, "validator__freq": 2}
"""Options of the tests; `python -m tests.equivalence` trains ten steps. Three are enough: each
mistake below changes the first update, so that the gradient norm of the second step differs; some
steps are clipped and others are not; and training goes on after a validation."""

LAYOUTS = {layout.name: layout for layout in all_layouts()}

DEFAULT = ("FSDP 2", "CP 2")

SLOW = (
    "DDP 2",
    "TP 2, uneven vocabulary",
    "PP 2 ZBVZeroBubble",
    "FSDP 2 x TP 2",
    "HSDP 2 x 2",
    "PP 2 1F1B x FSDP 2",
    "PP 2 DualPipeV x TP 2",
    "FSDP 2, tied embeddings",
    "FSDP 2, step in backward, AdamW",
    "TP 2, whole logits",
    "CP 2, contiguous, one text without documents",
    "PP 2 1F1B, tied embeddings",
    "PP 2 ZBVZeroBubble, tied embeddings",
    "PP 2 1F1B x FSDP 2, tied embeddings, AdamW",
    "PP 2 1F1B x TP 2, tied embeddings",
    "PP 2 Interleaved1F1B",
    "PP 2 LoopedBFS",
    "PP 2 InterleavedZeroBubble",
    "PP 4 1F1B",
    "FSDP 2 x TP 2, CPU offload",
    "FSDP 2 x CP 2",
    "TP 2, Qwen3, compile",
    "CP 2, windows",
    "TP 2, soft caps",
    "PP 2 1F1B, soft caps",
    "CP 2, local RoPE",
    "TP 2, norms over all heads",
    "PP 2 1F1B, multipliers",
    "CP 2, LongRoPE",
    "TP 2, norms on both sides",
    "CP 2, layers without positions",
    "FSDP 2, delta nets",
    "PP 2 1F1B, delta nets",
    "TP 2, delta nets",
    "CP 2, delta nets",
    "TP 2 x CP 2 x EP 2, delta nets and experts",
    "CP 2, short convolutions",
    "TP 2 x CP 2 x EP 2, Mamba and experts",
    "TP 2 x CP 2, one group of Mamba",
    "TP 2 x CP 2, reversing delta nets",
    "TP 2 x CP 2 x EP 2, Kimi Delta Attention",
    "FSDP 2, class of transformers",
    "TP 2, class of transformers",
    "FSDP 2, hybrid class of transformers",
    "PP 2 1F1B, hybrid class of transformers",
    "FSDP 2, experts",
    "TP 2, experts",
    "PP 2 1F1B, sigmoid router",
    "CP 2, sigmoid router",
    "EP 2, experts",
    "EP 2, sigmoid router, AC selective op",
    "TP 2 x ETP 2, experts",
    "FSDP 2 x TP 2 x EP 4, sigmoid router",
    "PP 2 1F1B x EP 2, experts",
    "TP 2, FLUX, AC full",
    "CP 2, DiT, compile, AC full",
    "TP 2 x CP 2, FLUX",
    "HSDP 2 x 2, FLUX",
)

LONG = (
    "TP 2 x CP 2, Qwen3",
    "FSDP 2, compile, AC memory budget",
    "PP 2 ZBVZeroBubble, AC selective op, compile",
    "TP 4, uneven vocabulary, AdamW",
    "CP 4",
    "FSDP 2 x TP 2, AC full",
    "DDP 2 x TP 2",
    "TP 2 x CP 2",
    "TP 4, Qwen3",
    "PP 2 1F1B x TP 2, Qwen3",
    "PP 2 ZBVZeroBubble x FSDP 2, AC every second layer",
    "PP 2 1F1B x DDP 2",
    "PP 2 ZBVZeroBubble x CP 2",
)
"""Layouts of the default, slow and long tests; `python -m tests.equivalence` runs all layouts."""


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with Matrix(THREE_STEPS) as matrix:
        yield matrix


def layout_parameters() -> Iterator[Any]:
    for name, layout in LAYOUTS.items():
        if layout.refused or name in DEFAULT:
            yield pytest.param(layout, id=name)
        elif name in SLOW:
            yield pytest.param(layout, id=name, marks=pytest.mark.slow)
        elif name in LONG:
            yield pytest.param(layout, id=name, marks=pytest.mark.long)


# --- mistakes are detected
# --------------------------------------------------------------------------------------------


class ForgetfulDims(ParallelDims):
    """Ignore context parallelism in the scale of gradients."""

    @property
    def gradient_degree(self) -> int:
        return self.dp_degree


class WrongScale(Trainer):
    """Compute the right loss, but scale gradients incorrectly."""

    def __init__(self, config: Trainer.Config):
        super().__init__(config)
        dims = self.parallel_dims
        self.parallel_dims = ForgetfulDims(
            **{name: getattr(dims, name) for name in dims.__dataclass_fields__}
        )


class ZeroedGradient(Trainer):
    """Set the gradient of one matrix to zero."""

    def clip_gradients(self) -> Tensor:
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                if canonical_name(name) == "layers.1.attention.wq.weight":
                    parameter.grad = torch.zeros_like(parameter)
        return super().clip_gradients()


class ThirdMicroBatchLost(CrossEntropyLoss):
    """Ignore every third micro-batch."""

    calls = 0

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor) -> Tensor:
        self.calls += 1
        loss = super().__call__(hidden_BLD, weight_VD, labels_BL)
        return loss * 0 if self.calls % 3 == 0 else loss


class DroppedMicroBatch(Trainer):
    """Lose some of the micro-batches of a pipeline."""

    def build_loss(self) -> Any:
        return ThirdMicroBatchLost(self.config.model_spec.loss)


class HeadGradientLost(Trainer):
    """Lose the last stage's gradient of a tied embedding."""

    def clip_gradients(self) -> Tensor:
        for part in self.model_parts:
            if part.head is not None:
                part.tok_embeddings.weight.grad = None
        return super().clip_gradients()


class CountedTwice(Trainer):
    """Count both copies of a tied embedding in the gradient norm."""

    def clip_gradients(self) -> Tensor:
        self.pipeline._copies = set()
        return super().clip_gradients()


class SeparateGradients(Trainer):
    """Do not sum the gradients of both copies of a tied embedding."""

    def clip_gradients(self) -> Tensor:
        self.pipeline._is_summed = True
        return super().clip_gradients()


class OwnImageTokens(ClassTextTrainer):
    """Let the tokens of an image attend to those of the same rank only."""

    def shard(self, part: Any, spec: Any, **options: Any) -> Any:
        alone = replace(spec, sharding=replace(spec.sharding, attention=""))
        return super().shard(part, alone, **options)


class UnscaledExperts(Trainer):
    """Sum the gradients of experts over the ranks that send tokens, but divide them as if these
    were others."""

    def parallelize(self, model: Any) -> Any:
        local = expert_parallel._local
        with mock.patch.object(
            expert_parallel, "_local", lambda experts, factor, *rest: local(experts, 1.0, *rest)
        ):
            return super().parallelize(model)


class Swapping(RaggedDataLoader):
    """Return two consecutive batches in the wrong order; the first of them has the index
    `swapped`."""

    swapped: int

    def __next__(self) -> dict[str, Tensor]:
        if not hasattr(self, "batches"):
            read = super().__next__
            first = [read() for _ in range(self.swapped + 2)]
            first[-2:] = reversed(first[-2:])
            self.batches = itertools.chain(first, iter(read, None))
        return next(self.batches)


class SwapsWithinStep(Swapping):
    """Swap two batches of the second global batch."""

    swapped = 2


class SwapsSteps(Swapping):
    """Swap a batch of the first and one of the second global batch."""

    swapped = 1


MISTAKES = {
    "gradient scale": ("CP 2", WrongScale, RaggedDataLoader, {"grad_norm", "weights"}),
    "gradient of a layer": ("FSDP 2", ZeroedGradient, RaggedDataLoader, {"grad_norm", "weights"}),
    "data order": ("FSDP 2", Trainer, SwapsSteps, {"loss", "grad_norm", "weights"}),
    "micro-batch": (
        "PP 2 1F1B",
        DroppedMicroBatch,
        RaggedDataLoader,
        {"loss", "grad_norm", "weights"},
    ),
    "head": (
        "PP 2 1F1B, tied embeddings",
        HeadGradientLost,
        RaggedDataLoader,
        {"loss", "grad_norm", "weights"},
    ),
    "expert gradient scale": (
        "EP 2, experts",
        UnscaledExperts,
        RaggedDataLoader,
        {"grad_norm", "weights"},
    ),
    "attention of images": (
        "CP 2, FLUX",
        OwnImageTokens,
        RaggedDataLoader,
        {"loss", "grad_norm", "validation_loss", "weights"},
    ),
    "norm": (
        "PP 2 ZBVZeroBubble, tied embeddings",
        CountedTwice,
        RaggedDataLoader,
        {"grad_norm", "weights"},
    ),
}
"""Layout, the mistake, and the numbers that must detect it."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_detected(matrix, mistake):
    name, trainer_class, loader, detected_by = MISTAKES[mistake]
    layout = LAYOUTS[name]
    differences = compare(matrix.outcome(layout, trainer_class, loader), matrix.reference(layout))
    assert not differences.agree
    # Ten times the tolerance, so the detection is not by chance.
    assert {field for field in detected_by if getattr(differences, field) > 1e-4} == detected_by, (
        differences
    )


@pytest.mark.slow
def test_separate_gradients_of_copies_are_detected(matrix):
    with pytest.raises(
        InconsistentRanks, match=r"tok_embeddings\.weight differs from copy to copy"
    ):
        matrix.outcome(LAYOUTS["PP 2 1F1B, tied embeddings"], SeparateGradients, RaggedDataLoader)


@pytest.mark.slow
def test_the_order_within_a_global_batch_does_not_matter(matrix):
    """The modified loader by itself has no effect on the comparison."""
    layout = LAYOUTS["FSDP 2"]
    assert compare(matrix.outcome(layout, Trainer, SwapsWithinStep), matrix.reference(layout)).agree


@pytest.mark.slow
def test_the_problem_is_sensitive_to_mistakes(matrix):
    """Only some of the steps are clipped, and each tensor changes by much more than the
    tolerance."""
    trained = matrix.reference(Layout("", 1, {}))
    assert min(trained.grad_norms) < PROBLEM["training__max_norm"] < max(trained.grad_norms)
    initial = matrix.reference(Layout("", 1, {"optimizer__lr": 0.0})).weights
    for name, weight in trained.weights.items():
        assert (weight - initial[name]).norm() > 20 * TOLERANCE * weight.norm(), name


# --- layouts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", layout_parameters())
def test_layout(matrix, layout):
    """Compare loss, gradient norm and validation loss of three steps, and the final weights; or
    expect a rejection."""
    row = matrix.run_one(layout)
    assert row.passed, f"{row.verdict} {row.differences}\n{row.failure}"


@pytest.mark.long
def test_random_layouts_on_a_text(assets):
    """Without seed 3, since two experts of a token have the same score there (docs/moe.md)."""
    extra = {
        name: assets / "text" / "tinyshakespeare.txt"
        for name in ("dataloader__dataset", "validator__dataset")
    }
    with Matrix(extra) as matrix:
        rows = list(matrix.run(draw_layouts(4, seed=4, extra=extra)))
    assert [row.verdict for row in rows] == ["equal"] * 4


# --- comparison and command line
# --------------------------------------------------------------------------------------


ONES = Outcome(
    losses=[2.0, 1.0], grad_norms=[1.0, 1.0], validation_losses=[3.0], weights={"w": torch.ones(4)}
)


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({}, "loss", 0.0),
        ({"losses": [2.0, 1.1]}, "loss", 0.1),
        ({"losses": [2.0]}, "loss", math.inf),
        ({"grad_norms": [1.0, math.nan]}, "grad_norm", math.nan),
        ({"validation_losses": []}, "validation_loss", math.inf),
        ({"weights": {"w": torch.tensor([1.0, 1.0, 1.0, 1.2])}}, "weights", 0.1),
        ({"weights": {"w": torch.full((4,), math.nan)}}, "weights", math.nan),
        ({"weights": {}}, "weights", math.inf),
        ({"weights": {"w": torch.ones(4), "v": torch.ones(1)}}, "weights", math.inf),
    ],
)
def test_differences(changes, field, expected):
    differences = compare(replace(ONES, **changes), ONES)
    assert getattr(differences, field) == pytest.approx(expected, nan_ok=True)
    assert differences.agree == (expected == 0)


def test_inconsistent_weights_of_ranks_are_rejected():
    first, second = [("a", torch.ones(2))], [("b", torch.zeros(2))]
    assert list(merge_weights([first, second, first, second], copies=2)) == ["a", "b"]
    assert list(merge_weights([first, second + first], copies=1, in_two_stages=["a"])) == ["a", "b"]
    with pytest.raises(InconsistentRanks, match="a has 2 copies, and should have 1"):
        merge_weights([first, first], copies=1)
    with pytest.raises(InconsistentRanks, match="a has 2 copies, and should have 1"):
        merge_weights([first + first], copies=1)
    with pytest.raises(InconsistentRanks, match="b has 1 copies, and should have 2"):
        merge_weights([first, first + second], copies=2)
    with pytest.raises(InconsistentRanks, match="a differs from copy to copy"):
        merge_weights([first, [("a", torch.tensor([1.0, 1.0 + 1e-6]))]], copies=2)


def make_row(**options: Any) -> Row:
    return Row(Layout("TP 2", 2, {}, refused=options.pop("refused", False)), seconds=1.0, **options)


CLOSE = Differences(loss=1e-7, grad_norm=2e-7, validation_loss=0.0, weights=3e-8, worst_weight="w")


@pytest.mark.parametrize(
    ("row", "passed", "verdict"),
    [
        (make_row(differences=CLOSE), True, "equal"),
        (make_row(differences=replace(CLOSE, grad_norm=1.1e-5)), False, "different"),
        (make_row(refusal="no"), False, "refused, unexpectedly: no"),
        (make_row(refusal="no", refused=True), True, "refused: no"),
        (make_row(refused=True), False, "not refused, as it should be"),
        (make_row(failure="Traceback\nValueError: x\n"), False, "failed: ValueError: x"),
    ],
)
def test_verdicts(row, passed, verdict):
    assert row.passed == passed
    assert cells(row)[-1] == verdict


def test_the_table_is_written_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    begin, end = markers("matrix")
    page.write_text(f"# Title\n{begin}\nold\n{end}\nend\n")
    table = as_markdown(COLUMNS, [TableRow(cells(make_row(differences=CLOSE)))])
    write_docs(page, "matrix", table)
    assert page.read_text() == f"# Title\n{begin}\n{table}\n{end}\nend\n"
    assert table.splitlines()[-1] == "| TP 2 | 2 | 1e-07 | 2e-07 | 0e+00 | 3e-08 | equal |"


def test_rows_of_other_layouts_stay(tmp_path):
    page, layouts = tmp_path / "page.md", [LAYOUTS[name] for name in ("FSDP 2", "TP 2", "CP 4")]
    old = [TableRow((layout.name, "2", *("",) * 4, "old")) for layout in layouts]
    page.write_text("\n".join(markers("matrix")))
    write_docs(
        page, "matrix", as_markdown(COLUMNS, [*old, TableRow(("no longer a layout", *("",) * 6))])
    )
    new = TableRow(("TP 2", "2", *("",) * 4, "new"))
    assert merge(page, [new]) == as_markdown(COLUMNS, [old[0], new, old[2]])


@pytest.mark.slow
def test_the_command_line_chooses_layouts():
    short = choose_layouts(parse_arguments([]), {})
    everything = choose_layouts(parse_arguments(["--long"]), {})
    assert {layout.processes for layout in short} == {2, 4}
    assert {layout.processes for layout in everything} == {2, 4, 8}
    assert [
        layout.name for layout in choose_layouts(parse_arguments(["--only", "^CP 4$"]), {})
    ] == ["CP 4"]
    drawn = choose_layouts(parse_arguments(["--random", "6", "--seed", "1"]), {})
    assert drawn == choose_layouts(parse_arguments(["--random", "6", "--seed", "1"]), {})
    assert drawn != choose_layouts(parse_arguments(["--random", "6", "--seed", "2"]), {})
    hybrids = choose_layouts(parse_arguments(["--random", "2", "--hybrids"]), {})
    assert all(layout.chosen["model__n_kv_heads"] == ABSENT for layout in hybrids)
    assert len(drawn) == 6


def test_reference_options_exclude_the_layout():
    layout = LAYOUTS["FSDP 2 x TP 2, tied embeddings, uneven vocabulary"]
    assert layout.reference_options == {
        "training__local_batch_size": 4,
        "model__tie_embeddings": True,
        "model__vocab_size": 2051,
    }
    assert layout.options["training__local_batch_size"] == 4  # 2 passes x 2 ranks x 4 samples = 16
    assert LAYOUTS["PP 2 1F1B"].options["training__local_batch_size"] == 8
    assert LAYOUTS["FSDP 2, step in backward"].options["training__local_batch_size"] == 8

"""Resuming in another layout: weights, optimizer state and data position."""

import pytest

from tests.training import launch, read_metrics, train

HSDP_2X2 = {"data_parallel_replicate_degree": 2}
PP_2_TP_2 = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
CP_2_TP_2 = {"context_parallel_degree": 2, "tensor_parallel_degree": 2}
ZBV_2 = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}
FSDP_4: dict[str, object] = {}

RUN = {
    "model__n_layers": 4,
    "training__global_batch_size": 8,
    "training__mixed_precision_param": "float32",
    "checkpoint__enable": True,
    "lr_scheduler__total_steps": 16,
}


def run_layouts(folder, options, *layouts):
    """Train four steps more in each layout, then all steps in one process; compare the metrics."""
    for hop, (processes, layout) in enumerate(layouts, start=1):
        chosen = {f"parallelism__{name}": value for name, value in layout.items()}
        launch(folder / "moved", processes, **RUN, **options, **chosen, training__steps=4 * hop)
    n_steps = 4 * len(layouts)
    train(
        folder / "one", **{**RUN, **options, "checkpoint__enable": False}, training__steps=n_steps
    )
    moved, one = (read_metrics(folder / name, "loss", "grad_norm") for name in ("moved", "one"))
    assert len(moved) == n_steps
    # Float32 sums in another order. Lost optimizer moments would change the losses after a hop by
    # far more.
    assert moved == [pytest.approx(line, rel=1e-5) for line in one]


@pytest.mark.slow
def test_resume_with_experts_on_other_ranks(tmp_path):
    ep_4, ep_2 = ({"expert_parallel_degree": degree} for degree in (4, 2))
    run_layouts(
        tmp_path, {"module": "qwen3_moe"}, (4, ep_4), (2, ep_2), (1, {}), (4, {**ep_2, **PP_2_TP_2})
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, FSDP_4), (4, PP_2_TP_2), marks=pytest.mark.slow, id="fsdp-to-pp-tp"),
        pytest.param((4, PP_2_TP_2), (4, FSDP_4), marks=pytest.mark.slow, id="pp-tp-to-fsdp"),
        pytest.param((2, ZBV_2), (4, CP_2_TP_2), marks=pytest.mark.long, id="zbv-to-cp-tp"),
        pytest.param((4, HSDP_2X2), (2, ZBV_2), marks=pytest.mark.long, id="hsdp-to-zbv"),
    ],
)
def test_resume_in_another_layout(tmp_path, before, after):
    run_layouts(tmp_path, {}, before, after)

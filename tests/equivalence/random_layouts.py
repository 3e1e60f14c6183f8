"""Random layouts."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.equivalence.layouts import (
    ADAMW,
    CHUNKS,
    CONVS_AND_EXPERTS,
    DELTA_NETS,
    EXPERTS,
    FUSED_NETS,
    GROWING_QUERIES,
    KIMI,
    LATENTS,
    MAMBA,
    NETS_AND_EXPERTS,
    ONE_GROUP,
    PROBLEM,
    REVERSING_NETS,
    SCHEDULES,
    SHORT_CONVS,
    SIGMOID,
    SINKS,
    SPARSE,
    Layout,
    Options,
)
from tests.equivalence.runs import make_config
from tests.training import ABSENT
from torchtitan.tools.errors import UserError

_CHOICES: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "data_parallel_replicate_degree": {},
    "data_parallel_shard_degree": {
        "parallelism__fsdp_reshard_after_forward": ("default", "always", "never"),
        "training__enable_cpu_offload": (False, True),
    },
    "context_parallel_degree": {
        "parallelism__context_parallel_load_balancer": ("headtail", "none")
    },
    "tensor_parallel_degree": {"parallelism__disable_loss_parallel": (False, True)},
    "pipeline_parallel_degree": {
        "parallelism__pipeline_parallel_schedule": SCHEDULES,
        "parallelism__pipeline_parallel_microbatch_size": (1, 2),
        "parallelism__pipeline_parallel_first_stage_less_layers": (1, 0),
        "parallelism__pipeline_parallel_last_stage_less_layers": (1, 0),
    },
}
"""Degrees, and the options to draw if a degree is above 1."""

_CHOICES_OF_ALL: Mapping[str, Sequence[Any]] = {
    "activation_checkpoint__mode": ("none", "none", "full", "selective"),
    "activation_checkpoint__selective_option": ("op", "2"),
    "compile__enable": (False, False, False, True),
    "compile__backend": ("aot_eager",),
    "training__max_norm": (2.2, 2.2, float("inf")),
    "loss__chunk_tokens": (100, 33, 0),
    "dataloader__document_mask": (True, True, False),
    "model__n_layers": (4, 3, 6, 8),
    "model__n_kv_heads": (4, 2, 8),
    "model__tie_embeddings": (False, False, True),
    "model__vocab_size": (2048, 2051),
}

_WITH_EXPERTS: Sequence[Options] = (
    EXPERTS,
    SIGMOID,
    {**LATENTS, "model__n_kv_heads": 8},
    SINKS,
    CHUNKS,
)
"""Models with experts; half of the layouts use one of them."""

_HYBRIDS: Sequence[Options] = (
    NETS_AND_EXPERTS,
    FUSED_NETS,
    MAMBA,
    CONVS_AND_EXPERTS,
    KIMI,
    SPARSE,
    GROWING_QUERIES,
    {**ONE_GROUP, "config": "granite_moe_debugmodel"},
)
"""Models with experts whose layers differ, or whose attention is latent."""

_WITHOUT_EXPERTS: Sequence[Options] = (DELTA_NETS, SHORT_CONVS, ONE_GROUP, REVERSING_NETS)


def draw_layouts(
    count: int, seed: int, extra: Options, *, hybrids: bool = False
) -> Iterator[Layout]:
    """Yield random layouts of two or four processes that the configuration accepts, sorted by
    number of processes.

    Args:
        count: number of layouts.
        seed: seed of the random choice.
        extra: additional options for all layouts.
        hybrids: draw only models whose layers differ, or whose attention is latent.
    """
    generator = random.Random(seed)
    drawn: list[Layout] = []
    while len(drawn) < count:
        layout = _draw(generator, hybrids)
        if _is_accepted(layout, extra):
            drawn.append(layout)
    yield from sorted(drawn, key=lambda layout: layout.processes)


def _draw(generator: random.Random, hybrids: bool) -> Layout:
    degrees = dict.fromkeys(_CHOICES, 1)
    processes = generator.choice((2, 4))
    for _ in range(processes // 2):  # 4 is 2 x 2
        degrees[generator.choice(list(_CHOICES))] *= 2
    options: dict[str, Any] = {f"parallelism__{name}": degree for name, degree in degrees.items()}
    applicable = [_CHOICES[name] for name, degree in degrees.items() if degree > 1]
    for choices in (*applicable, _CHOICES_OF_ALL):
        options |= {name: generator.choice(values) for name, values in choices.items()}
    options |= generator.choice(({}, ADAMW))
    if hybrids:
        options |= _draw_hybrid(generator, degrees)
    elif generator.choice((False, True)):
        options |= _draw_experts(generator, degrees, _WITH_EXPERTS)
    samples = PROBLEM["training__global_batch_size"]
    ranks = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    options["training__local_batch_size"] = samples // ranks // generator.choice((1, 2, 4))
    changed = [
        f"{name.partition('__')[2] or name}={value}"
        for name, value in options.items()
        if value is True or value not in (1, False)
    ]
    return Layout(" ".join(changed), processes, options)


def _draw_hybrid(generator: random.Random, degrees: Mapping[str, int]) -> dict[str, Any]:
    """Draw a model with layers of all its kinds and its own number of heads."""
    has_experts = generator.choice((True, True, False))
    return {
        **(
            _draw_experts(generator, degrees, _HYBRIDS)
            if has_experts
            else generator.choice(_WITHOUT_EXPERTS)
        ),
        "model__n_layers": generator.choice((4, 8)),
        "model__n_kv_heads": ABSENT,
    }


def _draw_experts(
    generator: random.Random, degrees: Mapping[str, int], models: Sequence[Options]
) -> dict[str, Any]:
    """Draw a model with experts, and how to divide them; not all ranks can."""
    tensor = degrees["tensor_parallel_degree"]
    by_width = generator.choice((1, tensor))
    ranks = (
        degrees["data_parallel_shard_degree"]
        * degrees["context_parallel_degree"]
        * tensor
        // by_width
    )
    return {
        **generator.choice(models),
        "parallelism__expert_parallel_degree": generator.choice(
            [n for n in (1, 2, 2, 4, 4) if ranks % n == 0]
        ),
        "parallelism__expert_tensor_parallel_degree": by_width,
    }


def _is_accepted(layout: Layout, extra: Options) -> bool:
    try:
        make_config(Path("unused"), {**extra, **layout.options}).check_layout(layout.processes)
    except UserError:
        return False
    return True

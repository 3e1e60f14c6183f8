"""Dry runs in which ranks divide the tokens of each window (context parallelism)."""

from typing import Any

import pytest

from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run.report import RankReport, reports_of

CONFIGS = {
    "qwen3_next": "qwen3_next_debugmodel",
    "qwen3_5": "qwen3_5_debugmodel",
    "nemotron_h": "nemotron_h_debugmodel",
    "granitemoehybrid": "granite_hybrid_debugmodel",
    "olmo_hybrid": "olmo_hybrid_debugmodel",
    "lfm2": "lfm2_debugmodel",
    "lfm2_moe": "lfm2_moe_debugmodel",
    "kimi_linear": "kimi_linear_debugmodel",
    "sparse attention": "deepseek_v3_sparse_debugmodel",
    "attention": "llama3_debugmodel",
}
"""Configurations of models whose mixers read the places of the tokens of all ranks, and one whose
attention does not."""

MODULES = {"granitemoehybrid": "granite", "lfm2_moe": "lfm2"}
MODULES |= {"sparse attention": "deepseek_v3", "attention": "llama3"}


def report(name: str, n_ranks: int, **degrees: int) -> RankReport:
    words = ["--module", MODULES.get(name, name), "--config", CONFIGS[name]]
    words += [f"--parallelism.{kind}_parallel_degree={degree}" for kind, degree in degrees.items()]
    words += ["--training.seq_len=64", "--activation_checkpoint.mode=none"]
    config = ConfigManager().parse_args(words).config
    model: Any = config.model_spec.model
    model.n_layers = 2
    if hasattr(model, "layer_types"):  # one layer of each type
        model.layer_types = list(dict.fromkeys(model.layer_types))
        model.n_layers = len(model.layer_types)
    (found,) = reports_of(config, n_ranks)
    return found


QUICK = ("lfm2", "sparse attention", "attention")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_each_rank_has_its_part_of_the_step(name):
    """Of a step of one rank, four ranks do a quarter each. Latent attention expands the latent
    vectors of all tokens on each rank, up to 3 % more operations. What each rank keeps in full, such
    as gathered keys, is up to a third of its activations."""
    alone = report(name, 1)
    one = report(name, 4, context=2, tensor=2)
    assert 1 <= 4 * one.executed_flops / alone.executed_flops < 1.03
    assert 1 <= 4 * one.saved_bytes / alone.saved_bytes < 4 / 3

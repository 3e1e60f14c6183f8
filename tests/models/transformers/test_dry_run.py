"""Dry runs of classes of transformers: the numbers of the plain class, with FSDP on fake ranks."""

import dataclasses
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from tests.models.transformers.model_types import default_config
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.tiny import tiny_config
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


def config_of(model_type: str, dump_folder: Path) -> Trainer.Config:
    """A run of a tiny model of a type."""
    arguments = ["--module", "transformers", "--config", "debugmodel", "--training.seq_len", "64"]
    config = ConfigManager().parse_args([*arguments, "--dump_folder", str(dump_folder)]).config
    model = TransformersModel.Config.of(tiny_config(default_config(model_type)).to_dict())
    model.vocab_size = 512
    config.model_spec = dataclasses.replace(config.model_spec, model=model)
    return config


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_moe"])
def test_predicts_a_step(model_type, tmp_path):
    config = config_of(model_type, tmp_path)
    model = config.model_spec.model
    (rank,) = dry_run(config, world_size=2)
    whole = sum(p.numel() for p in build_class(model.transformers_config()).parameters())
    assert whole / 2 <= rank.parameters < 1.05 * whole / 2  # rows of small tensors are padded
    # Windows are counted as whole squares.
    assert rank.executed_flops == pytest.approx(rank.model_flops, rel=0.1)
    assert {traffic.kind for traffic in rank.communication} >= {"all-gather", "reduce-scatter"}


def test_predicts_a_step_with_divided_experts(tmp_path):
    config = config_of("qwen3_moe", tmp_path)
    config.parallelism.expert_parallel_degree = 2
    (rank,) = dry_run(config, world_size=2)
    whole = sum(
        p.numel() for p in build_class(config.model_spec.model.transformers_config()).parameters()
    )
    assert whole / 2 <= rank.parameters < 1.05 * whole / 2
    assert "all-to-all" in {traffic.kind for traffic in rank.communication}


def test_a_class_that_reads_values_has_no_dry_run(tmp_path):
    """Step 3.7 loops over the experts that tokens chose."""
    with pytest.raises(UserError, match=r"reads some \(aten.nonzero.default\), as to loop over"):
        dry_run(config_of("step3p7", tmp_path), world_size=2)


def test_heads_that_differ_between_layers_limit_tensor_parallelism_together():
    of_layers = {index: {"num_attention_heads": 6} for index in (1, 3)}
    text = {"num_hidden_layers": 4, "num_attention_heads": 4, "per_layer_config": of_layers}
    document = CONFIG_MAPPING["step3p7"](text_config=text).to_dict()
    sizes = TransformersModel.Config.of(document).tensor_parallel_sizes
    assert sizes == {"num_attention_heads": 2, "num_key_value_heads": 8}

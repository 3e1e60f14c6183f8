"""Dry runs of classes of transformers: the numbers of the plain class, with FSDP on fake ranks."""

import dataclasses

import pytest
from transformers import CONFIG_MAPPING

from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.tiny import tiny_config


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_moe"])
def test_predicts_a_step(model_type, tmp_path):
    arguments = ["--module", "transformers", "--config", "debugmodel", "--training.seq_len", "64"]
    config = ConfigManager().parse_args([*arguments, "--dump_folder", str(tmp_path)]).config
    model = TransformersModel.Config.of(tiny_config(CONFIG_MAPPING[model_type]()).to_dict())
    model.vocab_size = 512
    config.model_spec = dataclasses.replace(config.model_spec, model=model)
    (rank,) = dry_run(config, world_size=2)
    whole = sum(p.numel() for p in build_class(model.transformers_config()).parameters())
    assert whole / 2 <= rank.parameters < 1.05 * whole / 2  # rows of small tensors are padded
    # Windows are counted as whole squares.
    assert rank.executed_flops == pytest.approx(rank.model_flops, rel=0.1)
    assert {traffic.kind for traffic in rank.communication} >= {"all-gather", "reduce-scatter"}

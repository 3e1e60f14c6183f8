"""DPO training (`--module preference --config dpo`) against TRL, in several layouts, resumed, and
as a dry run."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import PROJECT
from tests.processes import run_processes
from tests.training import flags, killed_in, read_metrics, run
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.preference.trainer import PreferenceTrainer
from torchtitan.tools.errors import UserError

TEMPLATE = (  # with the first token that TRL's CPOTrainer adds in any case
    "{{ bos_token }}"
    "{% for m in messages %}{{ m.content + eos_token if m.role == 'assistant' else 'Q: ' + "
    "m.content + ' A:\n' }}"
    "{% endfor %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 2048}
OPTIONS = {
    "training.steps": 4,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "training.max_norm": "inf",
    "optimizer.lr": 1e-3,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.decay_ratio": 0,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "activation_checkpoint.mode": "none",
    "loss.beta": 0.3,
    "dataloader.packing": "none",
    "dataloader.sampler.shuffle": False,
}
NUMBERS = {  # ours → TRL's
    "loss": "loss",
    "grad_norm": "grad_norm",
    "rewards/margins": "rewards/margins",
    "rewards/accuracies": "rewards/accuracies",
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with two models saved by transformers, `model` and `other`, and files of preference
    pairs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("preference")
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
    )
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / name)
    for file in (PROJECT / "torchtitan/assets/tokenizer").glob("*.json"):
        shutil.copy(file, folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    write_rows(folder / "pairs.jsonl", map(pair_of, range(16)))
    write_rows(folder / "odd.jsonl", map(pair_of, range(5)))
    return folder


def pair_of(i: int) -> dict[str, Any]:
    chosen = f"No, {i} is " + "quite " * (i % 5) + "small."
    return {
        "prompt": f"Is {i} a big number?",
        "chosen": chosen,
        "rejected": f"I like {i}." + " Very much." * (i % 3),
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def train_dpo(folder: Path, dump: Path, **options: object) -> PreferenceTrainer:
    changed = {key.replace("__", "."): value for key, value in options.items()}
    common = {
        "hf_assets_path": folder / "model",
        "dataloader.dataset": [folder / "pairs.jsonl"],
        "dump_folder": dump,
    }
    common["dataloader.cache_dir"] = folder / "cache"
    words = flags({**common, **OPTIONS, **changed})
    config = (
        ConfigManager().parse_args(["--module", "preference", "--config", "dpo", *words]).config
    )
    config.check(
        world_size=1
        if not torch.distributed.is_initialized()
        else torch.distributed.get_world_size()
    )
    trainer = run(config)
    assert isinstance(trainer, PreferenceTrainer)
    return trainer


@pytest.mark.slow
def test_metrics_match_trl(folder, tmp_path):
    """Four steps. Both compute in float32, with different kernels and orders of sums, and Adam
    amplifies differences of small gradients; 1e-4 is ten times the measured difference."""
    train_dpo(folder, tmp_path)
    expected = train_with_trl(folder, tmp_path / "trl")
    measured = read_metrics(tmp_path, *NUMBERS)
    assert [row[0] for row in measured] == [1, 2, 3, 4]
    for row, reference in zip(measured, expected, strict=True):
        assert row[1:] == pytest.approx(
            [reference[name] for name in NUMBERS.values()], rel=1e-4, abs=1e-5
        )
    assert abs(measured[-1][3]) > 0.01  # the model has moved away from the reference


def train_with_trl(folder: Path, output: Path) -> list[dict[str, float]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    sides = ("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant")
    chats = [{side: [{"role": role, "content": row[side]}] for side, role in sides} for row in rows]

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_: object) -> None:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = DPOConfig(
        output_dir=str(output),
        beta=OPTIONS["loss.beta"],
        learning_rate=OPTIONS["optimizer.lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=0.0,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        logging_first_step=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        max_length=64,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = InOrder(
        model, args=config, train_dataset=Dataset.from_list(chats), processing_class=tokenizer
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_metrics_do_not_depend_on_micro_batches_and_padding(folder, tmp_path):
    """Five pairs in an epoch, so that padding fills the last batch. The tolerance covers the order
    of sums."""
    options = {"dataloader__dataset": [folder / "odd.jsonl"], "training__epochs": 2}
    for size in (1, 2, 4):
        train_dpo(folder, tmp_path / str(size), training__local_batch_size=size, **options)
    whole, *parts = (read_metrics(tmp_path / size, *NUMBERS) for size in ("4", "1", "2"))
    assert len(whole) == 3
    for rows in parts:
        for row, expected in zip(rows, whole, strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"reference__offload": True},
        {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1},
    ],
    ids=["FSDP, offload", "TP"],
)
def test_a_sharded_reference_matches_one_process(folder, tmp_path, options):
    """The tolerance of 1e-4 covers a different order of sums over four steps of Adam."""
    train_dpo(folder, tmp_path / "one")
    run_processes(train_dpo_on_ranks, 2, folder, tmp_path / "two", options)
    for row, expected in zip(
        read_metrics(tmp_path / "two", *NUMBERS),
        read_metrics(tmp_path / "one", *NUMBERS),
        strict=True,
    ):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def train_dpo_on_ranks(folder: Path, dump: Path, options: dict[str, object]) -> None:
    train_dpo(folder, dump, training__local_batch_size=1, **options)


def test_resume_is_exact(folder, tmp_path):
    options = {"checkpoint__interval": 2, "training__steps": 4}
    train_dpo(folder, tmp_path / "straight", **options)
    with killed_in(PreferenceTrainer, "train_step", 4):
        train_dpo(folder, tmp_path / "stopped", **options)
    resumed = train_dpo(folder, tmp_path / "stopped", **options)
    assert read_metrics(tmp_path / "stopped", *NUMBERS) == read_metrics(
        tmp_path / "straight", *NUMBERS
    )
    assert "reference" not in resumed.states()


def test_validation_reports_the_margin(folder, tmp_path):
    """Validate on the training pairs after the last step: the metrics are better than before its
    update."""
    train_dpo(
        folder,
        tmp_path,
        validator__enable=True,
        validator__freq=4,
        validator__dataset=[folder / "pairs.jsonl"],
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (validation,) = (line for line in lines if "validation_loss" in line)
    last = next(line for line in reversed(lines) if "loss" in line)
    assert validation["validation_rewards/margins"] > last["rewards/margins"] > 0
    assert validation["validation_loss"] < last["loss"]
    assert validation["validation_rewards/accuracies"] == 1
    assert "validation_bits_per_byte" not in validation


def test_invalid_options_are_rejected(folder, tmp_path):
    with pytest.raises(UserError, match=r"--loss\.beta is 0"):
        train_dpo(folder, tmp_path, loss__beta=0)
    with pytest.raises(
        UserError,
        match=r"--parallelism\.pipeline_parallel_degree 2 cannot be combined with --module "
        r"preference",
    ):
        train_dpo(folder, tmp_path, parallelism__pipeline_parallel_degree=2)
    with pytest.raises(
        UserError,
        match=r"--reference\.offload is a part of FSDP, and needs --parallelism\.data_par",
    ):
        train_dpo(folder, tmp_path, reference__offload=True)


@pytest.mark.slow
def test_a_dry_run_counts_both_models(folder, tmp_path):
    from torchtitan.dry_run.report import reports_of
    from torchtitan.experiments.preference.config_registry import dpo as dpo_config

    config = dpo_config(str(folder / "model"))
    config.dump_folder, config.training.seq_len = str(tmp_path), 64
    (both,) = reports_of(config, 2)
    n_parameters = sum(
        weights.numel() for weights in load_file(folder / "model/model.safetensors").values()
    )
    assert both.parameters == pytest.approx(n_parameters, rel=0.01)  # half of each of two models
    assert both.executed_flops > 0
    config.reference.offload = True
    (offloaded,) = reports_of(config, 2)
    assert both.peak_bytes - offloaded.peak_bytes == pytest.approx(
        n_parameters / 2 * 4, rel=0.01
    )  # float32, as in its files
    assert offloaded.parameter_bytes == both.parameter_bytes


def test_plans_leave_out_layouts_that_a_run_would_refuse(folder):
    from torchtitan.experiments.preference.config_registry import dpo as dpo_config
    from torchtitan.foresight.planning import layouts, plan

    config = dpo_config(str(folder / "model"))
    assert {one.dims.shards for one in layouts(config, 2, 8)} == {1, 2}
    assert {(one.dims.pp, one.dims.cp) for one in layouts(config, 2, 8)} == {(1, 1)}
    config.reference.offload = True
    assert {one.dims.shards for one in layouts(config, 2, 8)} == {2}
    with pytest.raises(UserError, match="^--reference.offload is a part of FSDP"):
        plan(config, 1)


@pytest.mark.slow
def test_the_model_starts_equal_to_the_reference(folder, tmp_path):
    """This holds in bfloat16 too, in one process and with FSDP in two."""
    options = {"training__steps": 1, "training__mixed_precision_param": "bfloat16"}
    train_dpo(folder, tmp_path / "one", **options)
    run_processes(train_dpo_on_ranks, 2, folder, tmp_path / "two", options)
    for name in ("one", "two"):
        ((_, loss, margin),) = read_metrics(tmp_path / name, "loss", "rewards/margins")
        assert (loss, margin) == (pytest.approx(math.log(2), rel=1e-6), 0)


def test_resume_with_another_reference_is_rejected(folder, tmp_path):
    options = {
        "checkpoint__initial_load_path": "",
        "checkpoint__initial_load_in_hf": False,
        "training__steps": 2,
    }
    options |= {"checkpoint__last_save_in_hf": False, "checkpoint__export_dtype": "None"}
    train_dpo(folder, tmp_path, **options)
    with pytest.raises(
        UserError, match=r"weights of reference was drawn with --debug\.seed 0 .* and is .* 9"
    ):
        train_dpo(folder, tmp_path, **{**options, "training__steps": 3, "debug__seed": 9})


def test_a_missing_reference_is_rejected_before_the_run(folder, tmp_path):
    with pytest.raises(UserError, match=r"--reference\.path: /nowhere"):
        train_dpo(folder, tmp_path, reference__path="/nowhere")

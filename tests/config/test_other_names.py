"""Options of other libraries, answered with ours."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from torchtitan.config.manager import ConfigManager
from torchtitan.config.other_names import OTHER_NAMES
from torchtitan.tools.errors import UserError

DEBUG = ["--module", "llama3", "--config", "debugmodel"]


def known_options() -> set[str]:
    """Return all options of all configurations."""
    table = resources.files("torchtitan.assets") / "options.json"
    sections = json.loads(table.read_text())["sections"]
    return {name for section in sections for name in section["options"]}


def test_each_answer_names_options_that_exist():
    selectors = {"module", "config", "config_file", "hf_assets_path"}
    known = known_options() | selectors
    for name, answer in OTHER_NAMES.items():
        named = re.findall(r"--([\w.]+\w)", answer)
        groups = [option for option in named if option not in known]
        # A section may be named as a whole.
        missing = [one for one in groups if not any(each.startswith(f"{one}.") for each in known)]
        assert not missing, name
        assert name not in known


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--learning_rate", "1e-4"], "unknown option --learning_rate; use --optimizer.lr"),
        (["--learning-rate=1e-4"], "unknown option --learning-rate; use --optimizer.lr"),
        (["--max_seq_length", "64"], "unknown option --max_seq_length; use --training.seq_len"),
        (["--num_train_epochs", "3"], "use --training.epochs"),
        (["--per_device_train_batch_size", "8"], "use --training.local_batch_size"),
        (["--gradient_accumulation_steps", "4"], "use --training.global_batch_size: "),
        (["--output_dir", "x"], "use --dump_folder"),
        (["--bf16"], "use --training.mixed_precision_param bfloat16"),
        (["--warmup_ratio", "0.1"], "use --lr_scheduler.warmup_ratio"),
        (["--save_steps", "10"], "use --checkpoint.interval"),
        (["--lora_r", "8"], "use --model_converters.lora.rank"),
        (["--lora_target_modules", "q_proj"], "use --model_converters.lora.include"),
        (["--load_in_4bit"], "use --config qlora"),
        (["--report_to", "wandb"], "use --metrics.enable_wandb"),
        (["--resume_from_checkpoint"], "use nothing: a run with --checkpoint.enable"),
        (["--training.compile"], "use --compile.enable"),
        (["--checkpoint.enable_checkpoint"], "use --checkpoint.enable"),
        (["--train.micro_batch_size", "4"], "use --training.local_batch_size"),
        (["--flash_attn", "fa2"], "use nothing: the fastest kernel"),
        (["--lr_scheduler", "cosine"], "use --lr_scheduler.decay_type"),
        (["--optimizer=adamw_torch"], "use --optimizer.name"),
        (["--model", "Qwen/Qwen3-8B"], "use --hf_assets_path DIR"),
        (["--train_type", "lora"], "use --config sft, lora or qlora"),
        (["--quantization_bit", "4"], "use --config qlora"),
        (["--stage", "dpo"], "use --module preference"),
        (["--eval.interval", "10"], "use --validator.freq"),
        (["--early_stopping_patience", "3"], "use --callbacks.earlystopping.patience"),
        (["--args.save_total_limit", "2"], "use --checkpoint.keep_latest_k"),
        (
            ["--training.tensor_parallel_degree", "2"],
            "mean '--parallelism.tensor_parallel_degree'?",
        ),
        (["--experimental.context_parallel_degree", "2"], "--parallelism.context_parallel_degree?"),
        (["--gc_steps", "10"], "use --training.gc_freq"),
        (["--label_smoothing_factor", "0.1"], "use nothing: the loss of tokens has"),
        (["--dataloader_drop_last"], "use nothing: no row is dropped"),
        (["--beta", "0.1"], "use --loss.beta of --module preference"),
        (["--tf32"], "use nothing: "),
        (["--chat_template", "chatml"], "use --dataloader.chat_template"),
        (["--validation.enabled"], "use --validator.enable"),
        (["--lora_query"], "use --model_converters.lora.include"),
        (["--optimizer.fused"], "use --optimizer.implementation"),
        (["--actor_learning_rate", "1e-6"], "use --optimizer.lr"),
        (["--n_samples_per_prompt", "8"], "use --rollout.group_size of --module rl"),
        (["--pretrain", "x/y"], "use --hf_assets_path DIR"),
        (["--zero_stage", "3"], "use --parallelism.data_parallel_shard_degree"),
        (["--data.train_batch_size", "8"], "use --training.global_batch_size: prompts per step"),
        (["--trainer.n_gpus_per_node", "8"], "use NGPU=N"),
        (
            ["data.train_files=x.parquet"],
            "unknown option --data.train_files; use --dataloader.data",
        ),
        (["data.val_files=x.json"], "unknown option --data.val_files; use --validator.dataset"),
        (["+algorithm.adv_estimator=grpo"], "--algorithm.adv_estimator; use --policy.method"),
        (["training.steps=5"], "'training.steps=5' belongs to no option; write --training.steps=5"),
        (["++training.seq-len=5"], "belongs to no option; write --training.seq_len=5"),
        (["stpes=5"], "unknown option --stpes"),
        (["--tensor-model-parallel-size", "2"], "use --parallelism.tensor_parallel_degree"),
        (["--train-iters", "5"], "use --training.steps"),
        (["--model.micro_batch_size", "2"], "use --training.local_batch_size"),
        (["--exp_manager.exp_dir", "x"], "use --dump_folder"),
        (["--modul", "qwen3"], "unknown option --modul; did you mean '--module'?"),
        (["--config_fil", "a.yaml"], "did you mean '--config_file'?"),
        (["-lr", "1e-4"], "unknown option --lr; use --optimizer.lr"),
        (["-training.steps", "5"], "begins with two dashes: write --training.steps"),
        (["--optimizer.name", "adamw_torch"], "ScheduleFreeAdamW; did you mean 'AdamW'?"),
        (["--optimizer.name", "adamw_8bit"], "did you mean 'AdamW8bit'?"),
        (["--compile.components", "model", "losses"], "did you mean 'loss'?"),
        (["--lr_scheduler.decay_type", "cosine_with_restarts"], "did you mean 'cosine'?"),
        (["--lr_scheduler.decay_type", "WSD"], "must be one of linear, sqrt, cosine, power"),
        (["--trust_remote_code"], "use TORCHTITAN_TRUST_REMOTE_CODE=1"),
        (["--datasets.path", "x.jsonl"], "use --dataloader.dataset"),
        (["--eval_sample_packing"], "use nothing: validation packs as training does"),
        (["--excess_length_strategy", "drop"], "use --dataloader.too_long drop"),
        (["--dp_shard_size", "2"], "use --parallelism.data_parallel_shard_degree"),
        (["--num-processes", "2"], "use NGPU=N"),
        (["--lisa_n_layers", "4"], "use `Freeze` in a configuration function"),
        (["--reward_model"], "use --module reward --config bradley_terry"),
        (["--torchao_optimizer"], "use --optimizer.name AdamW8bit"),
        (["--config", "axo.yml"], "is a file; use --config_file axo.yml, or for a file of another"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_of_another_library_is_answered(words: list[str], answer: str):
    with pytest.raises(UserError) as error:
        ConfigManager().parse_args([*DEBUG, *words])
    assert answer in str(error.value)


def test_a_key_of_another_library_is_answered(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("learning_rate: 1.0e-4")
    with pytest.raises(
        UserError,
        match="unknown key 'learning_rate' in .*; use --optimizer.lr. For a whole file .*: torchtitan migrate .*config.yaml",
    ):
        ConfigManager().parse_args([*DEBUG, "--config_file", str(file)])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer",
            "a recipe of another",
        ),
        ("data:\n  train_files: a.parquet", "use --dataloader.dataset. For a whole file"),
        ("lr_scheduler:\n  decay_type: Cosine_annealing", "power; did you mean 'cosine'"),
    ],
)
def test_a_file_of_another_library_is_answered(tmp_path: Path, text: str, answer: str):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        ConfigManager().parse_args([*DEBUG, "--config_file", str(file)])
    assert answer in str(error.value)


def test_the_name_of_a_model_is_no_module():
    answer = "torchtitan download meta-llama/Llama-3.2-1B, then --module auto --hf_assets_path "
    with pytest.raises(UserError, match=f"{answer}assets/hf/Llama-3.2-1B$"):
        ConfigManager().parse_args(["--module", "meta-llama/Llama-3.2-1B", "--config", "lora"])


def test_another_name_is_answered_before_the_folder_is_missed():
    words = ["--module", "auto", "--config", "sft", "--model_name_or_path", "Qwen/Qwen3-8B"]
    with pytest.raises(UserError, match="--model_name_or_path; use --hf_assets_path DIR"):
        ConfigManager().parse_args(words)
    with pytest.raises(UserError, match="configuration 'sft' needs --hf_assets_path"):
        ConfigManager().parse_args(words[:4])

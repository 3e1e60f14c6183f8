"""Values of other libraries' files that mean something else than they seem, and their remedies."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.config.migration.test_migration import config_of, folder, migration_of
from torchtitan.config.migration.migrate import migrated
from torchtitan.config.migration.outcome import Migration
from torchtitan.config.migration.reading import read_command, read_foreign
from torchtitan.tools.errors import UserError

__all__ = ["folder"]

MISS = "without a counterpart"


def of_command(command: str) -> Migration:
    return migrated(read_command(shlex.split(command)))


def of_script(text: str, tmp_path: Path) -> Migration:
    return migration_of("train.sh", text, tmp_path)


def outcomes(migration: Migration) -> dict[str, str]:
    return {row.key.removesuffix(" (default)"): row.outcome for row in migration.rows}


TRL = "--model_name_or_path org/m --dataset_name org/d "
FACTORY = "model_name_or_path: org/m\ndataset: mine\n"
AXOLOTL = "base_model: org/m\ndatasets: [{path: org/d}]\n"
TITAN = '[job]\n[model]\nname = "llama3"\nflavor = "debugmodel"\n'
TUNE = """\
model: {_component_: torchtune.models.llama3.llama3_8b}
optimizer: {_component_: torch.optim.AdamW}
checkpointer: {checkpoint_dir: /m}
"""

COMMANDS: dict[str, dict[str, Any]] = {
    # 8 completions x 4 passes, in groups of 8
    f"trl grpo {TRL} --gradient_accumulation_steps 4": {
        "training.global_batch_size": 4,
        "training.local_batch_size": 1,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 512,
        "policy.method": "dapo",
        "policy.advantage": "normalized",
        "policy.clip_high": 0.2,
    },
    f"trl grpo {TRL} --num_generations 4 --per_device_train_batch_size 16 --beta 0.04": {
        "training.global_batch_size": 4,
        "training.local_batch_size": 4,
        "policy.beta": 0.04,
    },
    f"trl grpo {TRL} --loss_type dr_grpo --scale_rewards false --temperature 0.7 --top_k 0": {
        "policy.method": "dr_grpo",
        "policy.advantage": "centered",
        "rollout.temperature": 0.7,
        "rollout.top_k": None,
    },
    f"trl kto {TRL} --beta 0.3": {"loss.beta": 0.3, "dataloader.packing": None},
    f"trl dpo {TRL} --loss_type robust --label_smoothing 0.2": {
        "loss.kind": "robust",
        "loss.label_smoothing": 0.2,
    },
    f"trl dpo {TRL} --packing true": {"dataloader.packing": "none"},
    f"trl sft {TRL} --lr_scheduler_type warmup_stable_decay --max_steps 100 "
    "--lr_scheduler_kwargs.num_decay_steps 20": {"lr_scheduler.decay_ratio": 0.2},
    f"trl sft {TRL} --lr_scheduler_type warmup_stable_decay": {"lr_scheduler.decay_ratio": 0.0},
    f"torchrun --nproc_per_node 8 --nnodes=2 dpo.py {TRL} --beta 0.2": {
        "loss.beta": 0.2,
        "training.global_batch_size": 128,
    },
    f"accelerate launch --num_machines 2 --num_processes 8 x/sft.py {TRL}": {
        "training.global_batch_size": 64,
        "dataloader.packing": "none",
    },
    f"torchrun --nproc_per_node 4 -m trl.scripts.dpo {TRL}": {"training.global_batch_size": 32},
    f"trl sft {TRL} --num_processes 2 --no_bf16": {
        "training.global_batch_size": 16,
        "training.mixed_precision_param": "float32",
    },
    f"python run_clm.py {TRL} --block_size 512": {
        "optimizer.lr": 5e-5,
        "training.mixed_precision_param": "float32",
        "training.seq_len": 512,
    },
    f"python run_clm.py {TRL} --do_eval": {"validator.dataset": ["org/d[validation]"]},
    f"python train.py {TRL} --do_eval": {"validator.dataset": ["org/d[test]"]},
    "python train.py --model_name_or_path org/m --train_file a.txt --validation_file b.txt "
    "--block_size 64 --do_eval --fp16": {
        "dataloader.dataset": ["a.txt"],
        "validator.dataset": ["b.txt"],
        "validator.enable": True,
        "training.seq_len": 64,
        "training.mixed_precision_param": "float16",
        "dataloader.packing": None,
    },
    f"python train.py {TRL}": {"optimizer.lr": 5e-5, "activation_checkpoint.mode": None},
    "trl sft --model_name_or_path gpt2 --dataset_name org/d": {"hf_assets_path": "assets/hf/gpt2"},
    "trl sft --model_name_or_path tests/config --dataset_name org/d": {
        "hf_assets_path": "tests/config"
    },
    "NGPU=4 CONFIG=debugmodel ./run_train.sh --training.local_batch_size 2 "
    "--training.gradient_accumulation_steps 3": {"training.global_batch_size": 24},
    "litgpt finetune_lora checkpoints/Org/Model --lora_r 4": {
        "model_converters.lora.rank": 4,
        "hf_assets_path": "assets/hf/Model",
        "training.global_batch_size": 16,
        "dataloader.dataset": ["yahma/alpaca-cleaned"],
    },
    "litgpt finetune_lora Org/Model": {"model_converters.lora.include": ["q_proj", "v_proj"]},
    "litgpt pretrain pythia-160m --data TinyStories": {
        "training.global_batch_size": 512,
        "lr_scheduler.warmup_steps": 2000,
        "training.max_norm": 1.0,
    },
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command):
    expected = COMMANDS[command]
    options = of_command(command).options
    assert {key: options.get(key) for key in expected} == expected


def test_a_floor_of_the_rate_is_stated_once():
    """Not also as an end at rate 0."""
    command = f"trl sft {TRL} --lr_scheduler_type cosine_with_min_lr "
    found = of_command(f"{command} --lr_scheduler_kwargs.min_lr_rate 0.1")
    assert found.options["lr_scheduler.min_lr_factor"] == 0.1
    assert [row.key for row in found.rows if "min_lr_factor" in row.note] == [
        "lr_scheduler_kwargs.min_lr_rate"
    ]


def test_a_type_is_stated_once():
    found = of_command(f"python train.py {TRL} --fp16")
    notes = [row.note for row in found.rows if "mixed_precision" in row.note]
    assert notes == ["training.mixed_precision_param: float16"]


def test_the_answer_nothing_is_no_remedy():
    rows = of_command(f"trl sft {TRL} --label_smoothing_factor 0.1").rows
    [note] = [row.note for row in rows if row.key == "label_smoothing_factor"]
    assert note == "the loss of tokens has no smoothing"


FILES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "one.toml": (
        TITAN + "[training]\nlocal_batch_size = 8\ngradient_accumulation_steps = 4\n"
        "[experimental]\npipeline_parallel_microbatches = 2\n",
        {
            "training.global_batch_size": 64,
            "parallelism.pipeline_parallel_microbatch_size": 4,
        },
        {},
    ),
    "tensor.toml": (  # two devices compute one batch
        TITAN + "[training]\nlocal_batch_size = 8\ngradient_accumulation_steps = 4\n"
        "[parallelism]\ntensor_parallel_degree = 2\n",
        {"training.global_batch_size": 32},
        {},
    ),
    "unequal.toml": (
        TITAN + "[training]\nlocal_batch_size = 8\n"
        "[experimental]\npipeline_parallel_microbatches = 3\n",
        {},
        {"experimental.pipeline_parallel_microbatches": MISS},
    ),
    "dpo_axolotl.yaml": (
        AXOLOTL + "rl: dpo\nsample_packing: true\nexcess_length_strategy: truncate",
        {"dataloader.packing": "none", "dataloader.too_long": None, "loss.kind": "dpo"},
        {"sample_packing": "changed", "excess_length_strategy": MISS},
    ),
    "orpo.yaml": (
        AXOLOTL + "rl: orpo\norpo_alpha: 0.2\nadapter: lora",
        {"loss.weight": 0.2, "loss.kind": "orpo", "loss.beta": None},
        {},
    ),
    "simpo.yaml": (
        AXOLOTL + "rl: simpo\nadapter: lora",
        {"loss.kind": "simpo", "loss.beta": 0.1, "loss.gamma": 0.5},
        {"cpo_alpha": MISS},
    ),
    "raise.yaml": (
        AXOLOTL + "excess_length_strategy: raise",
        {"dataloader.too_long": "error"},
        {},
    ),
    "pretrain.yaml": (
        "base_model: org/m\npretraining_dataset: [{path: a.txt}]\nsample_packing: true",
        {"dataloader.packing": None, "dataloader.dataset": ["a.txt"]},
        {"sample_packing": "not needed"},
    ),
    "several.yaml": (
        AXOLOTL + "test_datasets: [{path: a.jsonl}, {path: b.jsonl}]\neval_strategy: steps",
        {"validator.dataset": ["a.jsonl", "b.jsonl"]},
        {},
    ),
    "grpo.yaml": (
        AXOLOTL + "rl: grpo\nadapter: lora\nmicro_batch_size: 16\n"
        "trl: {num_generations: 4, beta: 0.1, loss_type: grpo}",
        {
            "training.global_batch_size": 4,
            "policy.beta": 0.1,
            "policy.method": "grpo",
            "dataloader.packing": None,
        },
        {"adapter": "changed"},
    ),
    "kto.yaml": (
        AXOLOTL + "rl: kto\nadapter: qlora\nload_in_4bit: true\nlora_r: 4\nlora_alpha: 8",
        {"model_converters.qlora.rank": 4, "model_converters.qlora.alpha": 8.0},
        {"adapter": "changed", "load_in_4bit": "changed"},
    ),
    "rm.yaml": (
        FACTORY + "stage: rm\nlora_rank: 4",
        {"dataloader.packing": "none", "model_converters.lora.rank": 4},
        {},
    ),
    "factory_kto.yaml": (
        FACTORY + "stage: kto\npref_beta: 0.2\nstreaming: true\nbuffer_size: 64",
        {
            "loss.kind": None,
            "loss.beta": 0.2,
            "dataloader.stream": "all",
            "dataloader.shuffle_buffer": 64,
        },
        {},
    ),
    "prepared.yaml": (
        AXOLOTL + "rl: dpo\ndataset_prepared_path: last_run_prepared",
        {"dataloader.cache_dir": None},
        {"dataset_prepared_path": "not needed"},
    ),
    "off.toml": (
        TITAN + "[checkpoint]\nenable = false\nlast_save_model_only = true\n"
        'export_dtype = "float32"\n[quantize.linear.float8]\n'
        "enable_fsdp_float8_all_gather = false\n",
        {"checkpoint.export_dtype": None, "checkpoint.last_save_model_only": None},
        {"quantize.linear.float8.enable_fsdp_float8_all_gather": "not needed"},
    ),
    "full.toml": (
        TITAN + "[checkpoint]\nenable_checkpoint = true\nlast_save_model_only = false\n"
        'export_dtype = "float32"\n',
        {"checkpoint.enable": True, "checkpoint.export_dtype": None},
        {},
    ),
    "pt.yaml": (FACTORY + "stage: pt", {"dataloader.packing": "ffd"}, {}),
    "factory_simpo.yaml": (
        FACTORY + "stage: dpo\npref_loss: simpo\ndisable_gradient_checkpointing: true",
        {"loss.gamma": 0.5, "activation_checkpoint.mode": "none", "dataloader.packing": "none"},
        {},
    ),
    "factory_8_bits.yaml": (
        FACTORY + "stage: sft\nquantization_bit: 8",
        {"model_converters.lora.rank": 8},
        {"quantization_bit": MISS},
    ),
    "instruct.yaml": (
        TUNE + "dataset: {_component_: torchtune.datasets.instruct_dataset, source: org/d}\n"
        "max_steps_per_epoch: 5\nepochs: 2",
        {"dataloader.chat_template": None, "training.steps": 10},
        {"dataset._component_": "changed", "max_steps_per_epoch": "changed"},
    ),
    "tune_validation.yaml": (
        TUNE.replace("/m}", "/m, output_dir: /out}")
        + "dataset: {_component_: torchtune.datasets.chat_dataset, source: json, packed: true,\n"
        '  data_files: [a.jsonl, b.jsonl], split: "train[:9%]", conversation_column: messages}\n'
        "dataset_val: {_component_: torchtune.datasets.chat_dataset, source: json,\n"
        "  data_files: c.jsonl, conversation_column: turns}\n"
        "run_val_every_n_steps: 7\ndata_parallel_replicate_dim: 2\n"
        "lr_scheduler: {_component_: get_cosine_schedule_with_warmup, num_cycles: 0.5}",
        {
            "dataloader.dataset": ["a.jsonl", "b.jsonl"],
            "dump_folder": "/out",
            "parallelism.data_parallel_replicate_degree": 2,
            "validator.enable": True,
            "validator.dataset": ["c.jsonl"],
            "validator.freq": 7,
        },
        {
            "dataset_val.conversation_column": MISS,
            "dataset_val.data_files": "not needed",
            "lr_scheduler.num_cycles": "not needed",
            "split train[:9%] of a.jsonl": MISS,
        },
    ),
    "smoothed.yaml": (
        FACTORY + "stage: dpo\ndpo_label_smoothing: 0.1\nuse_galore: true\nuse_badam: false",
        {"loss.kind": "cdpo", "loss.label_smoothing": 0.1},
        {"use_galore": MISS, "use_badam": "not needed"},
    ),
    "unsmoothed.yaml": (
        FACTORY + "stage: dpo\npref_loss: orpo\ndpo_label_smoothing: 0.1",
        {"loss.kind": "orpo", "loss.label_smoothing": None},
        {"dpo_label_smoothing": MISS},
    ),
    "sharded.yaml": (
        AXOLOTL + "fsdp_config: {fsdp_state_dict_type: FULL, fsdp_offload_params: true}",
        {"training.enable_cpu_offload": True},
        {"fsdp_config.fsdp_state_dict_type": "not needed"},
    ),
    "part.yaml": (
        AXOLOTL.replace("path: org/d", 'path: org/d, split: "train[:95%]"'),
        {"dataloader.dataset": ["org/d"]},
        {"split train[:95%] of org/d": MISS},
    ),
    "instructions.yaml": (
        AXOLOTL.replace("path: org/d", "path: org/d, type: alpaca"),
        {"dataloader.chat_template": "alpaca"},
        {"chat_template": "changed"},
    ),
    "conversations.yaml": (
        AXOLOTL.replace("path: org/d", "path: org/d, type: chat_template"),
        {"dataloader.chat_template": None},
        {"chat_template": None},
    ),
    "mixed.yaml": (
        AXOLOTL.replace(
            "{path: org/d}", "{path: a/a, type: alpaca}, {path: b/b, type: chat_template}"
        ),
        {"dataloader.chat_template": None, "dataloader.dataset": ["a/a", "b/b"]},
        {"chat_template": MISS},
    ),
    "short.yaml": (AXOLOTL.replace("org/d", "gsm8k"), {}, {"name of gsm8k": MISS}),
    "off.yaml": (AXOLOTL + "made_up: false\nother: 0", {}, {"made_up": MISS, "other": MISS}),
    "not_held_out.yaml": (
        AXOLOTL + "val_set_size: 0.0\nunsloth_lora_mlp: true",
        {},
        {"val_set_size": "not needed", "unsloth_lora_mlp": "not needed"},
    ),
    "held_out.yaml": (AXOLOTL + "val_set_size: 0.05", {}, {"val_set_size": MISS}),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name, tmp_path):
    text, expected, rows = FILES[name]
    migration = migration_of(name, text, tmp_path, devices=2 if name.endswith(".toml") else 1)
    assert {key: migration.options.get(key) for key in expected} == expected
    found = outcomes(migration)
    assert {key: found.get(key) for key in rows} == rows


def test_packed_pairs_of_axolotl_are_not_said_to_be_packed(tmp_path):
    text = AXOLOTL + "rl: dpo\nsample_packing: true"
    rows = {row.key: row for row in migration_of("a.yaml", text, tmp_path).rows}
    assert rows["sample_packing"].note == "dataloader.packing: none; a batch counts pairs"


def test_a_constant_rate_does_not_end_at_0():
    rows = {row.key: row for row in of_command(f"trl sft {TRL} --lr_scheduler_type constant").rows}
    assert "ends at rate 0" not in rows["lr_scheduler_type"].note


def test_adapters_in_4_bits_are_named_as_in_the_file():
    migration = of_command(f"trl sft {TRL} --load_in_4bit true --use_peft --lora_r 4")
    assert migration.options["model_converters.qlora.rank"] == 4
    rows = {row.key: row for row in migration.rows}
    assert rows["lora_r"].note == "model_converters.qlora.rank: 4"


def test_four_bits_of_a_dpo_stay():
    migration = of_command(f"trl dpo {TRL} --load_in_4bit true --use_peft --lora_r 4")
    assert (migration.module, migration.config) == ("preference", "dpo_qlora")
    rows = {row.key: row for row in migration.rows}
    assert rows["load_in_4bit"].note == "--config dpo_qlora"
    assert rows["lora_r"].note == "model_converters.qlora.rank: 4"


@pytest.mark.parametrize(
    "end", ["2>&1 | tee --append log", "> log 2> errors", "&& echo --no", "; echo --no", "2>log"]
)
def test_a_script_ends_at_an_operator(end, tmp_path):
    text = f"cd x; export A=1 && torchrun --nproc_per_node=4 dpo.py {TRL} --run_name 'a|b' {end}\n"
    foreign = read_foreign(_script(text, tmp_path))
    assert (foreign.kind, foreign.devices) == ("trl", 4)
    expected = {"model_name_or_path": "org/m", "dataset_name": "org/d", "run_name": "a|b"}
    assert foreign.values == expected


def _script(text: str, tmp_path: Path) -> Path:
    file = tmp_path / "train.sh"
    file.write_text(text)
    return file


def test_datasets_for_validation_of_llama_factory_have_subset_and_split(tmp_path):
    (tmp_path / "dataset_info.json").write_text(
        '{"a": {"hf_hub_url": "org/a", "subset": "s", "split": "test"}, '
        '"b": {"file_name": "b.json"}}'
    )
    text = (
        FACTORY + f"stage: sft\neval_dataset: a, b\neval_strategy: steps\ndataset_dir: {tmp_path}"
    )
    options = migration_of("a.yaml", text, tmp_path).options
    assert options["validator.dataset"] == ["org/a:s[test]", str(tmp_path / "b.json")]


def test_pre_training_of_llama_factory_reads_the_column_of_text(tmp_path):
    """Its loader has no other columns."""
    (tmp_path / "dataset_info.json").write_text(
        '{"a": {"file_name": "a.json", "columns": {"prompt": "content"}}, '
        '"b": {"file_name": "b.json", "columns": {"prompt": "body"}}}'
    )
    text = FACTORY + f"stage: pt\nfinetuning_type: full\npacking: true\ndataset_dir: {tmp_path}"
    migration = migration_of("a.yaml", text.replace("mine", "a"), tmp_path)
    assert migration.config == "pretrain"
    assert migration.options["dataloader.text_column"] == "content"
    assert "dataloader.columns" not in migration.options
    outcomes = {row.key: row.outcome for row in migration.rows}
    assert outcomes["packing"] == "not needed"
    both = migration_of("b.yaml", text.replace("mine", "a, b"), tmp_path)
    assert {row.key: row.outcome for row in both.rows}["columns of the datasets"] == MISS
    assert "dataloader.text_column" not in both.options


TRAINED = {
    "grpo_lora": f"trl grpo --use_peft --lora_r 4 --beta 0.1 --loss_type grpo --top_p 0.9 {TRL}",
    "reward_lora": f"trl reward --use_peft --lora_r 4 {TRL}",
    "kto_lora": f"trl kto --use_peft --lora_r 4 --lora_alpha 8 --beta 0.2 {TRL}",
    "dpo_qlora": f"trl dpo --use_peft --loss_type ipo --load_in_4bit true {TRL}",
}


def accept(migration: Migration, folder: Path, tmp_path: Path) -> None:
    """Check the configuration as `torchtitan train` does, with a model and data that exist."""
    migration.options["hf_assets_path"] = str(folder / "model")
    migration.options["dataloader.dataset"] = [str(folder / "pairs.jsonl")]
    more = ["--rewards", "length=5"] if migration.module == "rl" else []
    config_of(migration, tmp_path, *more).check(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "orpo.yaml",
        "simpo.yaml",
        "grpo.yaml",
        "kto.yaml",
        "rm.yaml",
        "factory_simpo.yaml",
        "factory_kto.yaml",
        "prepared.yaml",
    ],
)
def test_files_of_methods_are_accepted(name, folder, tmp_path):
    accept(migration_of(name, FILES[name][0], tmp_path), folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("config", TRAINED)
def test_methods_with_adapters_are_accepted(config, folder, tmp_path):
    migration = of_command(TRAINED[config])
    assert migration.config == config
    accept(migration, folder, tmp_path)


REFUSED = {
    "digits.json": (
        '{"model_name_or_path": "m", "max_steps": %s}' % ("9" * 5000),
        "not valid JSON",
    ),
    "text.json": ('{"model_name_or_path": "m", "max_steps": "%s"}' % ("9" * 5000), "100 digits"),
    "hex.toml": (TITAN + f"[training]\nsteps = 0x{'f' * 5000}", "100 digits"),
    "list.toml": (TITAN + f"[training]\nsteps = [0x{'f' * 5000}]", "100 digits"),
    "keys.py": ("def llama3_debugmodel():\n    return C(x={[]: 1})", "x has no value"),
    "groups.sh": (f"trl grpo {TRL} --num_generations 3", "groups of 3"),
    "nodes.sh": (f"torchrun --nproc_per_node gpu dpo.py {TRL}", "--nproc_per_node gpu: write a"),
    "adapter.sh": ("litgpt finetune_adapter m --lora_r 4", "only LoRA adapters are trained here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    text, message = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(message)):
        migration_of(name, text, tmp_path)


def test_a_command_names_the_library_of_its_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model_name_or_path: org/m\ndataset_name: org/d\n")
    assert of_command(f"trl sft --config {file}").options["optimizer.lr"] == 2e-5
    assert of_command(f"accelerate launch run_dpo.py {file}").config == "dpo"


def test_an_expression_in_python_is_not_taken_as_its_text(tmp_path):
    text = "def llama3_debugmodel():\n    return C(hf_assets_path=DIR, dump_folder=NAME)"
    migration = migration_of("a.py", text, tmp_path)
    assert "hf_assets_path" not in migration.options
    assert "dump_folder" not in migration.options
    assert outcomes(migration)["dump_folder"] == MISS

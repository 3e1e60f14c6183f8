"""Files of other libraries become configurations that run, and train as the libraries do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.migration.samples import AXOLOTL_LORA, SAMPLES, TORCHTUNE_FULL
from tests.pretrained import make_pretrained
from tests.training import run
from torchtitan.cli.main import main
from torchtitan.config.manager import ConfigManager
from torchtitan.config.migration.migrate import migrated
from torchtitan.config.migration.outcome import Migration
from torchtitan.config.migration.reading import read_command, read_foreign
from torchtitan.dry_run import dry_run
from torchtitan.tools.errors import UserError

TOKENIZER = Path(__file__).parents[3] / "torchtitan/assets/tokenizer"

ROWS = [
    {"instruction": f"Add {n} and {n}.", "input": "", "output": f"It is {2 * n}, as you know."}
    for n in range(8)
]
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
"""Stanford's prompt for rows without an input."""

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model and its tokenizer, and data of each kind."""
    top = tmp_path_factory.mktemp("migration")
    make_pretrained(top / "model", initializer_range=0.02)
    for file in TOKENIZER.iterdir():
        if file.is_file():
            shutil.copy(file, top / "model")
    (top / "model/chat_template.jinja").write_text(TEMPLATE)
    chats = [
        {
            "conversations": [
                {"from": "human", "value": row["instruction"]},
                {"from": "gpt", "value": row["output"]},
            ]
        }
        for row in ROWS
    ]
    pairs = [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": "No."} for row in ROWS
    ]
    for name, rows in {"data": ROWS, "chats": chats, "pairs": pairs}.items():
        (top / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    listed = {"mine": {"file_name": "data.jsonl"}}
    (top / "dataset_info.json").write_text(json.dumps(listed))
    return top


def filled(text: str, folder: Path, **more: Any) -> str:
    """Return the text of a sample with paths in `folder`."""
    files = {name: folder / f"{name}.jsonl" for name in ("data", "chats", "pairs")}
    return text.format(model=folder / "model", folder=folder, **files, **more)


def migration_of(name: str, text: str, tmp_path: Path, **options: Any) -> Migration:
    file = tmp_path / name
    file.write_text(text)
    return migrated(read_foreign(file), **options)


def config_of(migration: Migration, tmp_path: Path, *words: str) -> Any:
    """Return the configuration that the command line reads from the migrated file."""
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(migration.document()).replace("Infinity", ".inf"))
    folder = ["--dump_folder", str(tmp_path / "outputs")]
    return ConfigManager().parse_args(["--config_file", str(file), *folder, *words]).config


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_runs(name, folder, tmp_path):
    migration = migration_of(name, filled(SAMPLES[name], folder), tmp_path)
    config = config_of(migration, tmp_path, "--metrics.no_enable_wandb")
    config.check(1)
    if name in SIMULATED:
        dry_run(config, 1)
    assert {row.outcome for row in migration.rows} >= {"taken over", "changed"}


SIMULATED = ("axolotl_qlora.yml", "factory_full.yaml", "trl_dpo.sh", "titan.toml")
"""Files of different methods, whose step is simulated."""

EXPECTED: dict[str, dict[str, Any]] = {
    "axolotl_lora.yml": {
        "training.local_batch_size": 4,
        "training.global_batch_size": 8,
        "model_converters.lora.include": ["q_proj", "v_proj", "down_proj"],
        "model_converters.lora.alpha": 16.0,
        "dataloader.chat_template": "alpaca",
        "dataloader.packing": "none",
        "lr_scheduler.min_lr_factor": 0.0,
        "lr_scheduler.warmup_from_zero": True,
        "optimizer.beta2": 0.999,
        "training.mixed_precision_param": "float32",
    },
    "axolotl_qlora.yml": {
        "model_converters.qlora.rank": 8,
        "dataloader.packing": "ffd",
        "lr_scheduler.warmup_steps": 0,  # the schedule constant has none
        "lr_scheduler.decay_ratio": 0.0,
        "training.steps": 20,
        "optimizer.name": "AdamW",
        "validator.freq": 10,
        "metrics.enable_wandb": True,
    },
    "axolotl_dpo.yml": {"training.epochs": 1, "model_converters.lora.rank": 4},
    "factory_lora.yaml": {
        "model_converters.lora.rank": 4,
        "model_converters.lora.alpha": 8.0,  # twice the rank
        "lr_scheduler.warmup_ratio": 0.1,
        "training.global_batch_size": 8,
        "training.epochs": 3,
    },
    "factory_full.yaml": {
        "dataloader.train_on": "last_assistant",
        "dataloader.chat_template": "",
        "training.steps": 10,
        "lr_scheduler.decay_ratio": 0.0,
        "lr_scheduler.warmup_steps": 3,
        "optimizer.param_groups.no_decay.pattern": "norm|bias",  # embeddings decay too
    },
    "trl_sft.yaml": {
        "model_converters.lora.include": ["q_proj", "v_proj"],  # PEFT's default
        "model_converters.lora.dropout": 0.05,
        "dataloader.train_on": "all",
        "lr_scheduler.min_lr_factor": 0.1,
        "training.global_batch_size": 16,
        "activation_checkpoint.mode": "none",
        "training.mixed_precision_param": "bfloat16",
    },
    "trl_dpo.sh": {"loss.kind": "hinge", "loss.beta": 0.05, "training.steps": 10},
    "transformers.json": {
        "training.mixed_precision_param": "float16",
        "lr_scheduler.decay_type": "linear",
        "optimizer.weight_decay": 0.01,
    },
    "tune_full.yaml": {
        "dataloader.train_on": "all",
        "training.max_norm": float("inf"),
        "optimizer.weight_decay": 0.01,  # torch's default for AdamW, on all weights
        "optimizer.param_groups.no_decay.weight_decay": 0.01,
        "training.steps": 6,
    },
    "tune_qlora.yaml": {
        "model_converters.qlora.include": [
            *("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        ],
        "dataloader.packing": "ffd",
        "lr_scheduler.decay_ratio": 0.0,  # no schedule
        "optimizer.name": "AdamW",
    },
    "litgpt.yaml": {
        "model_converters.lora.include": [
            *("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        ],
        "optimizer.beta2": 0.95,
        "dataloader.train_on": "all",
        "training.max_norm": float("inf"),
        "training.epochs": 2,
    },
    "titan.toml": {
        "training.local_batch_size": 8,
        "activation_checkpoint.selective_option": "2",
        "lr_scheduler.min_lr_factor": 0.1,
        "dataloader.dataset": ["stories"],
        "compile.enable": False,
    },
    "config_registry.py": {"optimizer.lr": 8e-4, "training.seq_len": 128, "training.steps": 10},
}
SELECTED = {
    "axolotl_lora.yml": ("auto", "lora"),
    "axolotl_qlora.yml": ("auto", "qlora"),
    "axolotl_dpo.yml": ("preference", "dpo_lora"),
    "factory_lora.yaml": ("auto", "lora"),
    "factory_full.yaml": ("auto", "sft"),
    "trl_sft.yaml": ("auto", "lora"),
    "trl_dpo.sh": ("preference", "dpo"),
    "transformers.json": ("auto", "sft"),
    "tune_full.yaml": ("auto", "sft"),
    "tune_qlora.yaml": ("auto", "qlora"),
    "litgpt.yaml": ("auto", "lora"),
    "titan.toml": ("llama3", "llama3_debugmodel"),
    "config_registry.py": ("llama3", "llama3_debugmodel"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_conventions_become_ours(name, folder, tmp_path):
    migration = migration_of(name, filled(SAMPLES[name], folder), tmp_path)
    assert (migration.module, migration.config) == SELECTED[name]
    expected = EXPECTED[name]
    assert {key: migration.options.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_each_key_has_a_row(name, folder, tmp_path):
    file = tmp_path / name
    file.write_text(filled(SAMPLES[name], folder))
    foreign = read_foreign(file)
    listed = [row.key for row in migrated(foreign).rows]
    given = {key for key, value in foreign.values.items() if value is not None}
    assert given - set(listed) == set()
    assert len(listed) == len(set(listed))


def test_defaults_of_trl_are_those_of_its_classes():
    trl = pytest.importorskip("trl")
    from torchtitan.config.migration.trl import METHODS, defaults

    classes = {
        "sft": trl.SFTConfig,
        "dpo": trl.DPOConfig,
        "grpo": trl.GRPOConfig,
        "reward": trl.RewardConfig,
    }
    assert set(classes) < set(METHODS)
    for method, of_trl in classes.items():
        fields = {name: field.default for name, field in of_trl.__dataclass_fields__.items()}
        # bf16 of None is on unless fp16 is.
        ours = {key: value for key, value in defaults(method).items() if key != "bf16"}
        assert {key: fields[key] for key in ours} == ours, method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "has the names of none of torchtune, .*; name its library with --from"),
        ("base_model: m\nadapter: ia3", "adapter ia3: adapters here are lora and qlora"),
        ("base_model: m\nrl: ppo2", "rl ppo2: methods here are"),
        ("base_model: m", "neither datasets nor pretraining_dataset"),
        ("base_model: m\ndatasets: 3", "a value is not as axolotl has it"),
        ("stage: ppo\nmodel_name_or_path: m", "stage ppo: here are pt, sft, rm, dpo and kto"),
        ("model: {_component_: torchtune.models.x.y}", "the recipe trains nothing"),
        ("[1]", "must map names to values"),
    ],
)
def test_a_file_that_cannot_migrate_is_refused(text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        migration_of("file.yaml", text, tmp_path)


def test_unknown_keys_are_listed(tmp_path):
    text = "base_model: m\ndatasets: [{path: a.jsonl, shards: 3}]\nmade_up: 3\nother: false"
    rows = {row.key: row for row in migration_of("file.yaml", text, tmp_path).rows}
    assert rows["made_up"].outcome == "without a counterpart"
    assert rows["other"].outcome == "without a counterpart"  # the default may be on
    assert "shards" in rows["datasets"].note


def test_a_limit_that_the_file_lacks_is_noted(folder, tmp_path):
    text = filled(SAMPLES["tune_qlora.yaml"], folder)
    rows = {row.key: row for row in migration_of("file.yaml", text, tmp_path).rows}
    row = rows["tokenizer.max_seq_len (default)"]
    assert row.outcome == "changed"
    assert row.note.startswith("training.seq_len: 2048; samples have no limit there")


@pytest.mark.parametrize(
    "name, options, outcome",
    [
        ("csv", {}, "not needed"),
        ("wandb", {"metrics.enable_wandb": True}, "changed"),
        ("mlflow", {"metrics.enable_mlflow": True}, "changed"),
        ("litlogger", {}, "without a counterpart"),
    ],
)
def test_loggers_and_texts_of_litgpt(name, options, outcome, folder, tmp_path):
    text = filled(SAMPLES["litgpt.yaml"], folder).replace("csv", name)
    text = text.replace("  interval: 100", "  interval: 100\n  max_new_tokens: 50")
    migration = migration_of("file.yaml", text, tmp_path)
    rows = {row.key: row for row in migration.rows}
    assert rows["logger_name"].outcome == outcome
    sinks = {k: v for k, v in migration.options.items() if k.startswith("metrics.enable_")}
    assert sinks == options
    assert "--callbacks.samples.prompts" in rows["eval.max_new_tokens"].note


def test_axolotl_stops_early_by_the_validation_loss(tmp_path):
    text = "base_model: org/m\ndatasets: [{path: org/d}]\nearly_stopping_patience: 2"
    options = migration_of("file.yml", text, tmp_path).options
    assert options["callbacks.earlystopping.metric"] == "validation_loss"
    assert options["callbacks.earlystopping.patience"] == 2


def test_devices_multiply_the_batch(folder, tmp_path):
    text = filled(SAMPLES["axolotl_lora.yml"], folder)
    assert (
        migration_of("file.yml", text, tmp_path, devices=4).options["training.global_batch_size"]
        == 32
    )


def test_a_command_line_may_follow():
    words = "trl dpo --model_name_or_path org/m --dataset_name org/pairs --beta=0.2 --bf16 false"
    words += " --eval_strategy steps --eval_steps 20"
    migration = migrated(read_command(words.split()))
    assert (migration.module, migration.config) == ("preference", "dpo")
    assert migration.options["loss.beta"] == 0.2
    assert migration.options["training.mixed_precision_param"] == "float32"
    assert migration.options["dataloader.dataset"] == ["org/pairs"]
    assert migration.options["validator.dataset"] == ["org/pairs[test]"]  # TRL's default split
    assert migration.options["validator.freq"] == 20
    assert migration.commands == ["torchtitan download org/m"]


def test_the_command_writes_a_file_and_prints_a_table(folder, tmp_path, capsys):
    file, out = tmp_path / "a.yml", tmp_path / "config.yaml"
    file.write_text(filled(SAMPLES["axolotl_lora.yml"], folder))
    assert main(["migrate", str(file), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for part in ("taken over (", "changed (", "not needed (", f"--config_file {out}"):
        assert part in printed
    assert out.read_text().startswith("# by torchtitan migrate, from axolotl\nmodule: auto\n")
    before = out.read_text()
    assert main(["migrate", str(file), "--out", str(out)]) == 2
    again = capsys.readouterr()
    assert "taken over (" in again.out and f"--out {out} exists; choose another" in again.err
    assert out.read_text() == before


def test_the_import_needs_no_torch():
    code = "import sys, torchtitan.cli.migrate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def losses_of(trainer: Any) -> list[float]:
    lines = (Path(trainer.config.dump_folder) / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.slow
def test_a_lora_of_axolotl_trains_as_in_trl(folder, tmp_path):
    """Batch, accumulation, schedule, mask and scale of adapters: TRL's trainer, with the same
    initial adapter and without dropout, has the same losses. All rows are in each step, since the
    orders differ."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    adapter = tmp_path / "adapter"
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = peft.get_peft_model(base, lora)
    model.save_pretrained(adapter)

    text = filled(AXOLOTL_LORA, folder, adapter=adapter)
    trainer = run(config_of(migration_of("a.yml", text, tmp_path), tmp_path))

    rows = [{"prompt": PROMPT.format(**row), "completion": row["output"]} for row in ROWS]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=6,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.0,
        max_length=256,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
    )
    theirs = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    theirs.train()
    expected = [row["loss"] for row in theirs.state.log_history if "loss" in row]
    assert len(expected) == 6
    assert expected[-1] < expected[0] - 0.1  # it learns
    # TRL logs four digits after the point or more; float32 otherwise.
    assert losses_of(trainer) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_full_fine_tune_of_torchtune_trains_as_in_transformers(folder, tmp_path):
    """As torchtune's documentation says: a loss on prompts too, torch's AdamW with its decay of
    0.01 on all weights, the cosine of transformers, no clipping."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        get_cosine_schedule_with_warmup,
    )

    text = filled(TORCHTUNE_FULL, folder)
    trainer = run(config_of(migration_of("a.yaml", text, tmp_path), tmp_path))

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 6)
    texts = [
        f"{tokenizer.bos_token}{PROMPT.format(**row)}{row['output']}{tokenizer.eos_token}"
        for row in ROWS
    ]
    samples = [tokenizer(one, add_special_tokens=False, return_tensors="pt") for one in texts]
    n_labels = sum(one["input_ids"].shape[1] - 1 for one in samples)
    expected = []
    for _ in range(6):
        total = 0.0
        for one in samples:
            loss = model(**one, labels=one["input_ids"]).loss * (one["input_ids"].shape[1] - 1)
            (loss / n_labels).backward()
            total += loss.item()
        expected.append(total / n_labels)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert expected[-1] < expected[0] - 0.1
    assert losses_of(trainer) == pytest.approx(expected, rel=1e-4)  # float32, six steps

"""Files of models that read images, other trainers of TRL, command lines with values without
dashes, and files that belong to other programs."""

import json

import pytest

from torchtitan.config.migration.migrate import migrated
from torchtitan.config.migration.outcome import Migration
from torchtitan.config.migration.reading import read_command, read_foreign
from torchtitan.tools.errors import UserError

AXOLOTL = "base_model: org/m\ndatasets: [{path: org/d, type: chat_template}]\n"
FACTORY = "model_name_or_path: org/m\ndataset: mine\n"
TRL = "--model_name_or_path org/m --dataset_name org/d"


def of_file(tmp_path, text: str, name: str = "file.yaml") -> Migration:
    (tmp_path / name).write_text(text)
    return migrated(read_foreign(tmp_path / name))


def of_command(words: str) -> Migration:
    return migrated(read_command(words.split()))


def selected(migration: Migration) -> tuple[str, str]:
    document = migration.document()
    return document["module"], document["config"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor_type: AutoProcessor", ("auto", "sft_images")),
        ("processor_type: AutoProcessor\nadapter: lora", ("auto", "lora_images")),
        ("processor_type: AutoProcessor\nadapter: qlora", ("auto", "qlora_images")),
        (
            "processor_type: AutoProcessor\nrl: dpo\nadapter: lora",
            ("preference", "dpo_lora_images"),
        ),
        ("processor_type: AutoProcessor\nrl: kto", ("preference", "kto_images")),
        (
            "processor_type: AutoProcessor\npretraining_dataset: [{path: a/b}]",
            ("auto", "pretrain_images"),
        ),
        ("adapter: lora", ("auto", "lora")),
    ],
)
def test_images_of_axolotl(text, expected, tmp_path):
    migration = of_file(tmp_path, AXOLOTL + text)
    assert selected(migration) == expected
    notes = [row.note for row in migration.rows if row.key == "processor_type"]
    assert all(f"--config {expected[1]}" in note for note in notes)


def test_adapters_of_grpo_read_images(tmp_path):
    text = "rl: grpo\nadapter: lora\nlora_r: 8\nmicro_batch_size: 8\nprocessor_type: AutoProcessor"
    migration = of_file(tmp_path, AXOLOTL + text)
    assert selected(migration) == ("rl", "grpo_lora_images")
    rows = {row.key: row for row in migration.rows}
    assert rows["adapter"].note == "--module rl --config grpo_lora_images"
    assert rows["lora_r"].outcome == "taken over"


@pytest.mark.parametrize(
    ("text", "expected", "parts"),
    [
        ("image_max_pixels: 262144", ("auto", "lora_images"), ["language"]),
        (
            "finetuning_type: full\nfreeze_vision_tower: false\nfreeze_language_model: true",
            ("auto", "sft_images"),
            ["vision"],
        ),
        ("template: llava", ("auto", "lora_images"), ["language"]),
        ("template: llama3", ("auto", "lora"), None),
        ("stage: rm\nimage_max_pixels: 1", ("reward", "reward_lora_images"), ["language"]),
    ],
)
def test_images_of_llama_factory(text, expected, parts, tmp_path):
    stage = "" if "stage" in text else "stage: sft\n"
    migration = of_file(tmp_path, f"{FACTORY}{stage}{text}")
    assert selected(migration) == expected
    assert migration.options.get("model.train") == parts


def test_a_listed_dataset_with_images(tmp_path):
    columns = {"messages": "conversations", "images": "pictures"}
    listed = {"mine": {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed))
    migration = of_file(tmp_path, f"{FACTORY}stage: sft\ndataset_dir: {tmp_path}")
    assert selected(migration) == ("auto", "lora_images")
    assert migration.options["dataloader.columns"] == ["images=pictures"]


def test_images_of_trl():
    words = f"accelerate launch examples/scripts/sft_vlm.py {TRL}"
    assert selected(of_command(words)) == ("auto", "sft_images")
    assert selected(of_command(f"python examples/scripts/sft.py {TRL}")) == ("auto", "sft")


def test_orpo_of_trl_is_orpo():
    migration = of_command(f"python examples/scripts/orpo.py {TRL} --beta 0.2")
    assert selected(migration) == ("preference", "dpo")
    assert migration.options["loss.kind"] == "orpo"
    assert migration.options["loss.weight"] == 0.2


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--loss_type exo_pair", {"loss.kind": "exo"}),
        ("--loss_type sigmoid_norm", {"loss.kind": "dpo_normalized"}),
        (
            "--loss_type sigmoid sft --loss_weights 1.0 0.5",
            {"loss.kind": "mix", "loss.mix": ["dpo=1", "sft=0.5"]},
        ),
    ],
)
def test_losses_of_trl(words, options):
    found = of_command(f"trl dpo {TRL} {words}").options
    assert {key: found.get(key) for key in options} == options


@pytest.mark.parametrize(
    ("script", "advice"),
    [
        ("dpo_online", "--config online_dpo"),
        ("cpo", "--loss.kind cpo"),
        ("gkd", "--module distillation --config gkd"),
        ("ppo/ppo", "--module ppo"),
        ("rloo", "--policy.advantage leave_one_out"),
        ("prm", "--module reward"),
        ("nash_md", "the nearest"),
    ],
)
def test_other_trainers_of_trl_are_not_taken_for_fine_tuning(script, advice):
    with pytest.raises(
        UserError, match=f"is not rewritten by torchtitan migrate; here: .*{advice}"
    ):
        of_command(f"python examples/scripts/{script}.py {TRL}")


def test_a_model_of_rewards_of_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match="process_reward_model: reward models here rate whole"):
        of_file(tmp_path, f"{AXOLOTL}process_reward_model: true\nnum_labels: 2")


def test_a_file_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="no model is named; add model_name_or_path"):
        of_file(tmp_path, "learning_rate: 1e-4\nmax_steps: 10")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "belongs to DeepSpeed, .*--devices N"),
        ("fsdp.yaml", "distributed_type: FSDP", "belongs to accelerate, .*--devices N"),
        (
            "nemo.yaml",
            "exp_manager: {exp_dir: x}",
            "belongs to NeMo, which torchtitan migrate does",
        ),
        ("verl.sh", "python3 -m verl.trainer.main_ppo \\\n data.x=1", "verl.sh belongs to verl"),
        ("swift.sh", "NPROC_PER_NODE=2 swift sft --model m", "swift.sh belongs to ms-swift"),
        ("own.py", "from unsloth import X\n", "is a script with unsloth, which is not run here"),
    ],
)
def test_files_of_other_programs(name, text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        of_file(tmp_path, text, name)


def test_a_dataset_may_have_the_name_of_another_program(tmp_path):
    text = "trl sft --model_name_or_path a/b --dataset_name swift/self-cognition"
    assert of_file(tmp_path, text, "trl.sh").config == "sft"


def test_values_without_dashes(tmp_path):
    """As LLaMA-Factory and torchtune have them: they override the file."""
    (tmp_path / "a.yaml").write_text(f"{FACTORY}stage: sft\nlearning_rate: 1e-4")
    words = f"NPROC_PER_NODE=4 llamafactory-cli train {tmp_path / 'a.yaml'} learning_rate=1e-5"
    options = of_command(words).options
    assert options["optimizer.lr"] == 1e-5
    assert options["training.global_batch_size"] == 8 * 4
    (tmp_path / "t.yaml").write_text("epochs: 3\nmodel: {_component_: torchtune.models.qwen3.x}")
    words = f"tune run --nproc_per_node 2 full --config {tmp_path / 't.yaml'} epochs=1 dataset.packed=True"
    foreign = read_command(words.split())
    assert (foreign.kind, foreign.devices) == ("torchtune", 2)
    assert foreign.values["epochs"] == 1 and foreign.values["dataset.packed"] is True


def test_keys_of_axolotl(tmp_path):
    text = (
        "rl: kto\nkto_desirable_weight: 0.2\nkto_undesirable_weight: 1.0\ndp_shard_size: 4\n"
        "fsdp_config: {reshard_after_forward: false, activation_checkpointing: true}"
    )
    options = of_file(tmp_path, AXOLOTL + text).options
    expected = {
        "loss.desirable_weight": 0.2,
        "loss.undesirable_weight": 1.0,
        "parallelism.data_parallel_shard_degree": 4,
        "parallelism.fsdp_reshard_after_forward": "never",
        "activation_checkpoint.mode": "full",
    }
    assert {key: options.get(key) for key in expected} == expected
    rows = {
        row.key: row
        for row in of_file(
            tmp_path, f"{AXOLOTL}rl: grpo\nmicro_batch_size: 8\ntrl: {{sync_ref_model: true}}"
        ).rows
    }
    assert rows["trl.sync_ref_model"].note == "use --reference.update_every, in steps"

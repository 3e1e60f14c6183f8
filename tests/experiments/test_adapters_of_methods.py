"""Configurations that train adapters: on weights in few bits, and with an adapter's base as the
reference."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.conftest import PROJECT
from tests.training import flags, read_metrics, run
from torchtitan.components.quantization import nf4
from torchtitan.config.manager import ConfigManager
from torchtitan.trainer import Trainer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A: {% else %}"
    "{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
OPTIONS = {
    "training.steps": 2,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-2,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "activation_checkpoint.mode": "none",
}
SAMPLED = {"rollout.max_new_tokens": 8, "rollout.max_rows": 4}
REWARDED = {**SAMPLED, "rollout.group_size": 4, "rewards": ["length=20"]}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")

# Module, configuration on weights in few bits, and on wide ones; options and numbers.
IN_FEW_BITS = {
    "dpo_qlora": ("preference", "dpo_lora", {}, REWARDS),
    "kto_qlora": ("preference", "kto_lora", {}, (*REWARDS, "kl")),
    "reward_qlora": ("reward", "reward_lora", {}, ("rewards/accuracies", "rewards/margins")),
    "grpo_qlora": ("rl", "grpo_lora", {**REWARDED, "policy.beta": 0.1}, ("reward", "entropy")),
}
OF_A_STUDENT = {
    "sft_lora": ({}, ("divergence",)),
    "on_policy_lora": (SAMPLED, ("divergence", "length")),
    "gkd_lora": (SAMPLED, ("divergence",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model saved by transformers, the same with weights rounded to NF4, another one
    as a teacher, and rows of each method."""
    folder = tmp_path_factory.mktemp("adapters")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=256,
    )
    for seed, name in ((0, "model"), (0, "rounded"), (1, "teacher")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        if name == "rounded":
            round_to_nf4(model.model.layers)
        model.save_pretrained(folder / name)
        for file in (PROJECT / "torchtitan/assets/tokenizer").glob("*.json"):
            shutil.copy(file, folder / name)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    pairs = [
        {"prompt": f"Is {i} big?", "chosen": f"No, {i} is small.", "rejected": "Yes, " * (i % 3)}
        for i in range(1, 9)
        if i % 3
    ]
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    for name, lines in {"pairs": pairs, "rows": rows}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@torch.no_grad()
def round_to_nf4(layers: torch.nn.Module) -> None:
    for layer in layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.copy_(nf4.unpack(*nf4.pack(layer.weight), torch.float32))


def train(folder: Path, dump: Path, module: str, config: str, more: dict[str, object]) -> Trainer:
    data = "pairs" if module in ("preference", "reward") else "rows"
    common = {
        "hf_assets_path": folder / "model",
        "dataloader.dataset": [folder / f"{data}.jsonl"],
        "dataloader.cache_dir": folder / "cache",
        "dump_folder": dump,
    }
    words = flags({**common, **OPTIONS, **more})
    parsed = ConfigManager().parse_args(["--module", module, "--config", config, *words]).config
    parsed.check(world_size=1)
    return run(parsed)


def adapters_alone_train(trainer: Trainer) -> bool:
    trained = [n for n, p in trainer.model_parts[0].named_parameters() if p.requires_grad]
    return bool(trained) and all("lora_" in name for name in trained)


@pytest.mark.parametrize("config", IN_FEW_BITS)
def test_few_bits_train_as_the_values_that_they_hold(folder, tmp_path, config):
    """As LoRA on the rounded weights; the order of sums differs over two steps of Adam: 1e-4."""
    module, wide, options, numbers = IN_FEW_BITS[config]
    packed = train(folder, tmp_path / "packed", module, config, options)
    rounded = {**options, "hf_assets_path": folder / "rounded"}
    train(folder, tmp_path / "wide", module, wide, rounded)
    assert adapters_alone_train(packed)
    assert "reference" not in packed.models
    attention = packed.model_parts[0].layers["0"].attention
    assert {p.dtype for n, p in attention.wq.named_parameters() if "packed" in n} == {torch.uint8}
    names = ("loss", "grad_norm", *numbers)
    rows, expected = (read_metrics(tmp_path / name, *names) for name in ("packed", "wide"))
    assert len(rows) == 2 and rows[0] != rows[1]
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("config", ["kto_lora", "online_dpo_lora"])
def test_the_reference_is_the_model_without_adapters(folder, tmp_path, config):
    """As a second model with the initial weights."""
    options = REWARDED if config.startswith("online") else {}
    rows = []
    for kind in ("adapters_off", "model"):
        own = {**options, "reference.kind": kind}
        trainer = train(folder, tmp_path / kind, "preference", config, own)
        assert adapters_alone_train(trainer)
        assert ("reference" in trainer.models) == (kind == "model")
        rows.append(read_metrics(tmp_path / kind, "loss", "grad_norm", *REWARDS))
    for row, other in zip(*rows, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert any(abs(value) > 1e-3 for value in rows[0][1][3:])


@pytest.mark.parametrize("config", OF_A_STUDENT)
def test_adapters_of_a_student_come_closer_to_the_teacher(folder, tmp_path, config):
    """The exported student holds the adapters' change."""
    options, numbers = OF_A_STUDENT[config]
    own = {"teacher.path": folder / "teacher", "training.steps": 6, **options}
    trainer = train(folder, tmp_path, "distillation", config, own)
    assert adapters_alone_train(trainer)
    first, *_, last = read_metrics(tmp_path, *numbers)
    assert last[1] < first[1]
    student, base = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tmp_path / "checkpoint/step-6", folder / "model")
    )
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected, plain = student(ids).logits, base(ids).logits
        tokens = trainer.model_parts[0](ids)
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(tokens.float(), expected, rtol=1e-4, atol=1e-4)

"""Arguments of TRL's scripts and of transformers' `TrainingArguments`."""

from collections.abc import Mapping
from typing import Any

from torchtitan.config.migration import hugging_face
from torchtitan.config.migration.hugging_face import TRAINING_DEFAULTS
from torchtitan.config.migration.outcome import (
    Migration,
    Rule,
    dataset_name,
    is_local,
    missing,
    to,
    unneeded,
)

_TRL = {
    **TRAINING_DEFAULTS,
    "bf16": True,
    "gradient_checkpointing": True,
    "logging_steps": 10,
}
_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "grpo": 1e-6, "reward": 1e-4}
METHODS = tuple(_RATES)
_PREFERENCE_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust"}


def defaults(method: str) -> dict[str, Any]:
    """Return the values that the trainer of a method uses for absent keys."""
    lengths = {} if method == "grpo" else {"max_length": 1024}
    return {**_TRL, **lengths, "learning_rate": _RATES[method]}


def method_of(given: Mapping[str, Any], command: str) -> str:
    """Return the method that the name of a script, or the keys, tell."""
    for method in METHODS:
        if f"{method}.py" in command or f"{method}_" in command or f"trl {method}" in command:
            return method
    if {"num_generations", "reward_funcs", "reward_model_path"} & set(given):
        return "grpo"
    return "dpo" if {"beta", "max_prompt_length"} & set(given) else "sft"


def migrate_trl(migration: Migration, method: str) -> None:
    """Read arguments of a method's trainer."""
    has_adapters = bool(migration.get("use_peft") or migration.get("load_in_4bit"))
    _select(migration, method, has_adapters)
    migration.use_model("model_name_or_path", str(migration.get("model_revision") or ""))
    if migration.get("model_revision") is not None:
        migration.drop("model_revision", "the command of the download has it")
    held_out = _data(migration, method)
    if has_adapters:
        _adapters(migration)
    hugging_face.batch(migration, "per_device_train_batch_size", "gradient_accumulation_steps")
    hugging_face.length(migration, "num_train_epochs")
    hugging_face.schedule(migration)
    hugging_face.optimizer(migration)
    hugging_face.decay(migration)
    hugging_face.precision(migration)
    hugging_face.saving(migration)
    hugging_face.evaluation(migration, held_out)
    migration.apply(RULES)
    hugging_face.on_quantized(migration)


def _select(migration: Migration, method: str, has_adapters: bool) -> None:
    in_4_bits = bool(migration.get("load_in_4bit"))
    adapted = "qlora" if in_4_bits else "lora"
    for key in ("use_peft", "load_in_4bit", "load_in_8bit"):
        if migration.get(key) is not None:
            migration.change(key, f"the configuration {adapted if has_adapters else 'sft'}")
    if method == "sft":
        migration.config = adapted if has_adapters else "sft"
    elif method == "dpo":
        migration.module, migration.config = "preference", "dpo_lora" if has_adapters else "dpo"
        _preference_loss(migration)
    else:
        modules = {
            "kto": ("preference", "kto"),
            "grpo": ("rl", "grpo"),
            "reward": ("reward", "bradley_terry"),
        }
        migration.module, migration.config = modules[method]
        if has_adapters:
            migration.miss("lora_r", f"{migration.config} trains whole models")


def _preference_loss(migration: Migration) -> None:
    names = migration.get("loss_type", "sigmoid")
    name = str(names[0] if isinstance(names, list) else names)
    if migration.get("loss_type") is not None:
        if name in _PREFERENCE_LOSSES:
            migration.take("loss_type", "loss.kind", _PREFERENCE_LOSSES[name])
        else:
            migration.miss("loss_type", "the file has dpo instead; see --loss.kind")
    if migration.get("beta") is not None:
        migration.take("beta", "loss.beta", float(migration.get("beta")))
    if migration.get("precompute_ref_log_probs") is not None:
        migration.drop("precompute_ref_log_probs", "--reference.kind chooses the reference")


def _data(migration: Migration, method: str) -> str:
    """Read the data, and return its held-out part, or ""."""
    name, held_out = migration.get("dataset_name"), ""
    config = migration.get("dataset_config") or migration.get("dataset_config_name")
    if name is not None:
        train = migration.get("dataset_train_split")
        dataset = dataset_name(str(name), config, None, train)
        migration.take("dataset_name", "dataloader.dataset", [dataset])
        if not is_local(str(name)):  # a file has no splits
            test = migration.get("dataset_test_split", "test")
            held_out = dataset_name(str(name), config, None, test)
        for key in ("dataset_config", "dataset_config_name"):
            if migration.get(key) is not None:
                migration.drop(key, "part of the name of the dataset")
        for key in ("dataset_train_split", "dataset_test_split"):
            if migration.get(key) is not None:
                migration.drop(key, "in brackets after the name of the dataset")
    elif (mixer := _mixer(migration)) is not None:
        migration.set(dataloader__dataset=mixer)
    if method == "sft":
        _loss_mask(migration)
        is_packed = bool(migration.get("packing"))
        migration.set(dataloader__packing="ffd" if is_packed else "none")
        if migration.get("packing") is not None:
            migration.take("packing", "dataloader.packing", "ffd" if is_packed else "none")
        migration.set(dataloader__too_long="truncate_right")
    return held_out


def _mixer(migration: Migration) -> list[str] | None:
    """Read the mixtures of the alignment handbook."""
    if isinstance(sets := migration.get("dataset_mixture.datasets"), list):
        names = [
            dataset_name(str(one.get("id")), one.get("config"), None, one.get("split"))
            for one in sets
        ]
        weights = sorted({float(one.get("weight", 1)) for one in sets})
        why = (
            "each is read in full"
            if weights == [1.0]
            else "weights there are parts of a dataset, here shares of the tokens: "
            "--dataloader.weights; each is read in full"
        )
        migration.change("dataset_mixture.datasets", why, dataloader__dataset=names)
        return names
    prefix = "dataset_mixer."
    found = [key.removeprefix(prefix) for key in migration.keys() if key.startswith(prefix)]
    splits = migration.get("dataset_splits")
    train = next((name for name in splits or [] if "train" in str(name)), None)
    for name in found:
        why = "" if float(migration.get(prefix + name)) == 1 else "the dataset is read in full"
        migration.take(prefix + name, "dataloader.dataset", dataset_name(name, split=train), why)
    if splits and found:
        migration.drop("dataset_splits", "in brackets after the name of the dataset")
    return [dataset_name(name, split=train) for name in found] or None


def _loss_mask(migration: Migration) -> None:
    """Set the trained turns: without options, TRL trains whole conversations, and completions."""
    keys = ("assistant_only_loss", "completion_only_loss")
    given = {key: migration.get(key) for key in keys if migration.get(key) is not None}
    only = any(given.values())
    for key in given:
        migration.take(key, "dataloader.train_on", "assistant" if only else "all")
    if not given:
        migration.change(
            "assistant_only_loss",
            "conversations are trained in full; for rows of prompt and completion, set assistant",
            dataloader__train_on="all",
        )


def _adapters(migration: Migration) -> None:
    for key, value in {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}.items():
        if migration.get(key) is None:
            migration.set(**{f"model_converters__lora__{_ADAPTER[key]}": value})
    if migration.get("lora_target_modules") is None:
        # The choice of PEFT for Llama, Qwen, Mistral and most others.
        migration.change(
            "lora_target_modules",
            "PEFT's choice for most families",
            model_converters__lora__include=["q_proj", "v_proj"],
        )


_ADAPTER = {"lora_r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}

RULES: Mapping[str, Rule] = {
    **hugging_face.RULES,
    "max_length": to("training.seq_len", int),
    "max_seq_length": to("training.seq_len", int),
    "max_prompt_length": missing("prompt and answer share --training.seq_len"),
    "max_completion_length": to("rollout.max_new_tokens", int),
    "num_generations": to("rollout.group_size", int),
    "temperature": to("rollout.sampling.temperature", float),
    "dataset_text_field": to("dataloader.columns", lambda name: [f"text={name}"]),
    "dataset_streaming": missing("data for fine-tuning is copied before training"),
    "chat_template_path": to("dataloader.chat_template"),
    "chat_template": missing("write it to a file: --dataloader.chat_template FILE"),
    "packing_strategy": unneeded("first-fit-decreasing, as TRL's bfd"),
    "padding_free": unneeded("packed samples do not see each other"),
    "eval_packing": unneeded("validation packs as training does"),
    "eos_token": unneeded("the template and the tokenizer have it"),
    "pad_token": unneeded("padding is never trained"),
    "report_to": hugging_face.report_to,
    "reward_funcs": missing("write a function: --rewards my_rewards.py:score"),
    "bnb_4bit_quant_type": unneeded("nf4"),
    "use_bnb_nested_quant": unneeded("always"),
}

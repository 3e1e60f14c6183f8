"""Arguments of TRL's scripts and of transformers' `TrainingArguments`."""

import re
from collections.abc import Mapping
from typing import Any

from torchtitan.config.migration import alignment, hugging_face
from torchtitan.config.migration.hugging_face import TRAINING_DEFAULTS
from torchtitan.config.migration.outcome import (
    Migration,
    Row,
    Rule,
    as_list,
    is_local,
    missing,
    to,
    unneeded,
)
from torchtitan.tools.errors import UserError

_TRL = {
    **TRAINING_DEFAULTS,
    "bf16": True,
    "gradient_checkpointing": True,
    "logging_steps": 10,
}
_RATES = {"sft": 2e-5, "dpo": 1e-6, "orpo": 1e-6, "kto": 1e-6, "grpo": 1e-6, "reward": 1e-4}
METHODS = tuple(_RATES)
TRANSFORMERS_DEFAULTS: Mapping[str, object] = {**TRAINING_DEFAULTS, "bf16": False}
_OTHERS = {
    "online": "--module preference --config online_dpo",
    "cpo": "--module preference --config simpo, with --loss.kind cpo for CPO",
    "bco": "--module preference --config dpo --loss.kind bco, for pairs",
    "nash": "--module preference --config online_dpo, the nearest",
    "xpo": "--module preference --config online_dpo, the nearest",
    "mpo": "--module preference --config dpo --loss.kind mix",
    "gkd": "--module distillation --config gkd",
    "ppo": "--module ppo --config ppo",
    "rloo": "--module rl --config grpo --policy.advantage leave_one_out",
    "prm": "reward models of whole answers, --module reward --config bradley_terry",
}
"""Part of the name of another trainer of TRL → what to use here."""

_OF_IMAGES = ("vlm", "vision")
"""Parts of the names of scripts that train on images."""

_PREFERENCE_LOSSES = {
    **{name: name for name in ("hinge", "ipo", "robust", "apo_zero", "apo_down", "discopop")},
    **{"sigmoid": "dpo", "sigmoid_norm": "dpo_normalized", "exo_pair": "exo", "nca_pair": "nca"},
    **{"bco_pair": "bco", "sppo_hard": "sppo", "aot": "aot", "aot_unpaired": "aot_unpaired"},
    "sft": "sft",
}


def defaults(method: str) -> dict[str, Any]:
    """Return the values that the trainer of a method uses for absent keys."""
    own = alignment.GRPO_DEFAULTS if method == "grpo" else {"max_length": 1024}
    return {**_TRL, **own, "learning_rate": _RATES[method]}


def method_of(given: Mapping[str, object], command: str) -> str:
    """Return the method that the name of a script, or the keys, tell."""
    if found := method_of_command(command):
        if found in _OTHERS:
            raise UserError(
                f"the trainer {found} of TRL is not rewritten by torchtitan migrate; here: "
                f"{_OTHERS[found]}"
            )
        return found
    if {"num_generations", "reward_funcs", "reward_model_path"} & set(given):
        return "grpo"
    return "dpo" if {"beta", "max_prompt_length"} & set(given) else "sft"


def method_of_command(command: str) -> str:
    """Return the method that the last part of a word names, as in trl/scripts/dpo.py, or a key of
    `_OTHERS`; "" if none does."""
    for parts in _parts_of_words(command):
        for method in (*_OTHERS, *METHODS):
            if method in parts:
                return method
    return ""


def _parts_of_words(command: str) -> list[list[str]]:
    """Return the parts of the last part of each word, as [sft, vlm] of scripts/sft_vlm.py."""
    names = (re.split(r"[/.]", word.removesuffix(".py"))[-1] for word in command.split())
    return [name.split("_") for name in names]


def migrate_trl(migration: Migration, method: str) -> None:
    """Read arguments of a method's trainer."""
    _select(migration, method)
    held_out = _model_and_data(migration)
    if method == "sft":
        _samples(migration)
    elif method != "grpo" and migration.get("max_length") is not None:
        why = "longer pairs are dropped, and counted"
        migration.take("max_length", "training.seq_len", int(migration.get("max_length")), why)
    if migration.has_adapters:
        _adapters(migration)
    if method == "grpo":
        group_size = alignment.grpo(migration)
        alignment.group_batch(migration, *_BATCH, group_size)
    _training(migration, held_out)


def migrate_transformers(migration: Migration) -> None:
    """Read arguments of transformers' `TrainingArguments`, of a script that fine-tunes."""
    if "run_clm" in migration.command or migration.get("block_size") is not None:
        migration.config = "pretrain"  # the script that has this key
        if (length := migration.get("block_size")) is not None:
            migration.take("block_size", "training.seq_len", int(length))
    else:
        why = "scripts differ in the samples that they make of rows; see --dataloader.train_on"
        migration.rows.append(Row("samples", "", "without a counterpart", why))
        migration.set(dataloader__packing="none")
    _training(migration, _model_and_data(migration))


_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def _model_and_data(migration: Migration) -> list[str]:
    """Read the model and the data, and return the held-out data."""
    migration.use_model("model_name_or_path", str(migration.get("model_revision") or ""))
    if migration.get("model_revision") is not None:
        migration.drop("model_revision", "the command of the download has it")
    return _data(migration)


def _training(migration: Migration, held_out: list[str]) -> None:
    """Read the options of all methods."""
    if migration.get(_BATCH[0]) is not None:
        hugging_face.batch(migration, *_BATCH)
    hugging_face.length(migration, "num_train_epochs")
    hugging_face.schedule(migration)
    hugging_face.optimizer(migration)
    hugging_face.decay(migration)
    hugging_face.precision(migration)
    hugging_face.saving(migration)
    hugging_face.evaluation(migration, held_out)
    migration.apply(RULES)
    hugging_face.finish_adapters(migration)


def _select(migration: Migration, method: str) -> None:
    in_4_bits = bool(migration.get("load_in_4bit"))
    # 4 bits without adapters would freeze all that TRL trains.
    adapters = bool(migration.get("use_peft") or in_4_bits)
    words = [word for parts in _parts_of_words(migration.command) for word in parts]
    images = any(word in _OF_IMAGES for word in words)
    of_pairs = "dpo" if method == "orpo" else method
    alignment.select(migration, of_pairs, adapters=adapters, in_4_bits=in_4_bits, images=images)
    if migration.get("use_peft") is not None:
        alignment.note_adapters(migration, "use_peft", wanted=bool(migration.get("use_peft")))
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if migration.get(key) is not None:
            alignment.note_bits(migration, key, bits=bits * bool(migration.get(key)))
    if method == "dpo":
        _preference_loss(migration)
    elif method == "orpo":
        migration.set(loss__kind="orpo")
        migration.default("beta", 0.1)
        alignment.orpo_weight(migration, "beta")
    elif method == "kto" and migration.get("beta") is not None:
        migration.take("beta", "loss.beta", float(migration.get("beta")))
    if method == "kto" and migration.get("loss_type") == "kto":
        migration.drop("loss_type", "the loss of --config kto")


def _preference_loss(migration: Migration) -> None:
    names = [str(name) for name in as_list(migration.get("loss_type", "sigmoid"))]
    weights = as_list(migration.get("loss_weights") or [1.0] * len(names))
    if len(names) > 1 and {*names} <= _PREFERENCE_LOSSES.keys() and len(weights) == len(names):
        of_ours = [
            f"{_PREFERENCE_LOSSES[name]}={float(weight):g}"
            for name, weight in zip(names, weights, strict=True)
        ]
        migration.set(loss__kind="mix")
        migration.take("loss_type", "loss.mix", of_ours)
        if migration.get("loss_weights") is not None:
            migration.drop("loss_weights", "part of loss.mix")
    elif migration.get("loss_type") is not None:
        if len(names) == 1 and names[0] in _PREFERENCE_LOSSES:
            migration.take("loss_type", "loss.kind", _PREFERENCE_LOSSES[names[0]])
        else:
            migration.miss("loss_type", "the file has dpo instead; see --loss.kind")
    if migration.get("beta") is not None:
        migration.take("beta", "loss.beta", float(migration.get("beta")))
    alignment.smoothing(migration, "label_smoothing")
    if migration.get("precompute_ref_log_probs") is not None:
        migration.drop("precompute_ref_log_probs", "--reference.kind chooses the reference")


def _data(migration: Migration) -> list[str]:
    """Read the data, and return its held-out part."""
    name, held_out = migration.get("dataset_name"), []
    config = migration.get("dataset_config") or migration.get("dataset_config_name")
    if name is not None:
        train = migration.get("dataset_train_split")
        dataset = migration.dataset(str(name), config, None, train)
        migration.take("dataset_name", "dataloader.dataset", [dataset])
        if not is_local(str(name)):  # a file has no splits
            # transformers' script for language models evaluates on another split than TRL
            default = "validation" if migration.config == "pretrain" else "test"
            test = migration.get("dataset_test_split", default)
            held_out = [migration.dataset(str(name), config, None, test)]
        for key in ("dataset_config", "dataset_config_name"):
            if migration.get(key) is not None:
                migration.drop(key, "part of the name of the dataset")
        for key in ("dataset_train_split", "dataset_test_split"):
            if migration.get(key) is not None:
                migration.drop(key, "in brackets after the name of the dataset")
    elif (mixer := _mixer(migration)) is not None:
        migration.set(dataloader__dataset=mixer)
    if (file := migration.get("train_file")) is not None:
        migration.take("train_file", "dataloader.dataset", [str(file)])
    if (file := migration.get("validation_file")) is not None:
        held_out = [str(file)]
        migration.take("validation_file", "validator.dataset", held_out)
    return held_out


def _samples(migration: Migration) -> None:
    """Set the samples that fine-tuning makes of rows."""
    _loss_mask(migration)
    is_packed = bool(migration.get("packing"))
    migration.set(dataloader__packing="ffd" if is_packed else "none")
    if migration.get("packing") is not None:
        migration.take("packing", "dataloader.packing", "ffd" if is_packed else "none")
    migration.set(dataloader__too_long="truncate_right")


def _mixer(migration: Migration) -> list[str] | None:
    """Read the mixtures of the alignment handbook."""
    if isinstance(sets := migration.get("dataset_mixture.datasets"), list):
        names = [
            migration.dataset(str(one.get("id")), one.get("config"), None, one.get("split"))
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
    names = [migration.dataset(name, split=train) for name in found]
    for name in found:
        why = "" if float(migration.get(prefix + name)) == 1 else "the dataset is read in full"
        migration.take(prefix + name, "dataloader.dataset", names, why)
    if splits and found:
        migration.drop("dataset_splits", "in brackets after the name of the dataset")
    return names or None


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
    "max_completion_length": missing("prompt and answer share --training.seq_len"),
    "dataset_text_field": to("dataloader.columns", lambda name: [f"text={name}"]),
    "dataset_streaming": hugging_face.streaming,
    "dataset_prompt_column": to("dataloader.columns", lambda name: [f"prompt={name}"]),
    "chat_template_path": to("dataloader.chat_template"),
    "chat_template": missing("write it to a file: --dataloader.chat_template FILE"),
    "packing_strategy": unneeded("first-fit-decreasing, as TRL's bfd"),
    "padding_free": unneeded("packed samples do not see each other"),
    "eval_packing": unneeded("validation packs as training does"),
    "eos_token": unneeded("the template and the tokenizer have it"),
    "pad_token": unneeded("padding is never trained"),
    "bnb_4bit_quant_type": unneeded("nf4"),
    "use_bnb_nested_quant": unneeded("always"),
}

"""Files of LLaMA-Factory. Names and defaults come from its documentation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.migration import alignment, hugging_face
from torchtitan.config.migration.hugging_face import TRAINING_DEFAULTS
from torchtitan.config.migration.outcome import (
    Migration,
    Row,
    Rule,
    as_list,
    missing,
    to,
    unneeded,
)
from torchtitan.tools.errors import UserError

DEFAULTS: Mapping[str, object] = {
    **TRAINING_DEFAULTS,
    "cutoff_len": 2048,
    "finetuning_type": "lora",
    "stage": "sft",
    "disable_gradient_checkpointing": False,
    "pref_loss": "sigmoid",
    "pref_beta": 0.1,
    "simpo_gamma": 0.5,
}
_LISTED = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
"""Stage → method."""

_LIST = "dataset_info.json"
_TEMPLATES = ("llama3", "chatml", "alpaca", "mistral")
_PREFERENCE_LOSSES = {
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "orpo": "orpo",
    "simpo": "simpo",
}
_FROZEN = {
    "freeze_language_model": "language",
    "freeze_multi_modal_projector": "projector",
    "freeze_vision_tower": "vision",
}
"""Key → the part of a model that reads images."""

_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "messages": "conversations",
    "images": "images",
}


def migrate_llama_factory(migration: Migration) -> None:
    """Read a file of LLaMA-Factory."""
    stage = _select(migration)
    migration.use_model("model_name_or_path", str(migration.get("model_revision") or ""))
    held_out = _held_out(migration)
    _data(migration, stage)
    if migration.has_adapters:
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
    hugging_face.finish_adapters(migration)


def _select(migration: Migration) -> str:
    """Choose the configuration, and return the stage."""
    _refuse_without_training(migration)
    stage, kind = str(migration.get("stage")), str(migration.get("finetuning_type"))
    bits = migration.get("quantization_bit")
    if kind not in ("lora", "full"):
        raise UserError(
            f"finetuning_type {kind}: here are lora and full; migrate it as full, and name what to "
            "train (docs/freezing.md)"
        )
    if stage not in _LISTED:
        raise UserError(f"stage {stage}: here are pt, sft, rm, dpo and kto")
    in_4_bits = bits is not None and int(bits) <= 4
    alignment.select(
        migration,
        _LISTED[stage],
        adapters=kind == "lora",
        in_4_bits=in_4_bits,
        images=_reads_images(migration),
    )
    if migration.reads_images:
        _parts(migration)
    if stage == "pt" and kind == "full":
        migration.config = "pretrain"
    elif stage == "dpo":
        _preference_loss(migration)
    elif stage == "kto":
        migration.take("pref_beta", "loss.beta", float(migration.get("pref_beta")))
        migration.drop("pref_loss", "KTO has a loss of its own")
    migration.change("stage", f"--module {migration.module} --config {migration.config_name}")
    if kind == "lora":
        alignment.note_adapters(migration, "finetuning_type", wanted=True)
    else:
        migration.change("finetuning_type", f"--config {migration.config_name}")
    if bits is not None:
        alignment.note_bits(migration, "quantization_bit", bits=int(bits))
    return stage


def _refuse_without_training(migration: Migration) -> None:
    """Raise `UserError` for a file that exports or tests a model."""
    if migration.get("export_dir") is not None and not migration.get("do_train"):
        raise UserError(
            "export_dir: the file exports a model, and trains nothing; use torchtitan convert, "
            "which also merges adapters"
        )
    if migration.get("do_train") is False or (
        migration.get("do_predict") and migration.get("do_train") is None
    ):
        raise UserError(
            "do_train is off: the file trains nothing; use torchtitan eval, or torchtitan generate"
        )


def _reads_images(migration: Migration) -> bool:
    """Return whether the file sets what only models that read images have, or a dataset has a
    column of images."""
    found = _known_datasets(migration)
    entries = [found[name][0] for name in _names(migration, "dataset") if name in found]
    has_column = any("images" in (entry.get("columns") or {}) for entry in entries)
    template = str(migration.get("template"))
    return (
        has_column
        or any(migration.get(key) is not None for key in ("image_max_pixels", *_FROZEN))
        or template.endswith("_vl")
        or template.startswith("llava")
    )


def _parts(migration: Migration) -> None:
    """Set the parts to train: without options, the language model alone."""
    frozen = {key: migration.get(key, key != "freeze_language_model") for key in _FROZEN}
    parts = [part for key, part in _FROZEN.items() if not frozen[key]]
    migration.set(model__train=parts)
    for key in _FROZEN:
        if migration.get(key) is not None:
            migration.take(key, "model.train", parts)


def _preference_loss(migration: Migration) -> None:
    loss = str(migration.get("pref_loss"))
    if loss in _PREFERENCE_LOSSES:
        migration.take("pref_loss", "loss.kind", _PREFERENCE_LOSSES[loss])
    else:
        migration.miss("pref_loss", "the file has dpo instead")
    if loss == "simpo":
        gamma = float(migration.get("simpo_gamma"))
        migration.take("simpo_gamma", "loss.gamma", gamma)
    elif "simpo_gamma" in migration.given:
        migration.drop("simpo_gamma", f"pref_loss is {loss}")
    if loss == "orpo":
        alignment.orpo_weight(migration, "pref_beta")
    else:
        migration.take("pref_beta", "loss.beta", float(migration.get("pref_beta")))
    alignment.smoothing(migration, "dpo_label_smoothing")


def _data(migration: Migration, stage: str) -> None:
    names, unknown, columns = _sources(migration, "dataset")
    migration.set(dataloader__dataset=names)
    if stage == "pt":
        _text_column(migration, columns)
    elif columns:
        migration.set(dataloader__columns=sorted(columns))
    if unknown:
        listed = ", ".join(unknown)
        why = f"{listed}: names in {_LIST}, which is not here; write the path of each file"
        migration.change("dataset", why, dataloader__dataset=names)
    else:
        migration.change("dataset", f"the files in {_LIST}", dataloader__dataset=names)
    if migration.get("dataset_dir") is not None:
        migration.drop("dataset_dir", "part of the paths of the data")
    if migration.config == "pretrain":
        if migration.get("packing"):
            migration.drop("packing", "text is always packed")
        return
    _template(migration)
    if migration.module == "auto":
        wanted = migration.get("packing", stage == "pt")
        is_packed = bool(wanted or migration.get("neat_packing"))
        migration.set(dataloader__packing="ffd" if is_packed else "none")
        migration.set(dataloader__too_long="truncate_right")
        for key in ("packing", "neat_packing"):
            if migration.get(key) is not None:
                migration.take(key, "dataloader.packing", "ffd" if is_packed else "none")
        if migration.get("train_on_prompt") is not None:
            value = "all" if migration.get("train_on_prompt") else "assistant"
            migration.take("train_on_prompt", "dataloader.train_on", value)


def _text_column(migration: Migration, columns: set[str]) -> None:
    """Read the column of pre-training's text, the prompt there."""
    beginning = f"{_COLUMNS['prompt']}="
    texts = sorted(one.removeprefix(beginning) for one in columns if one.startswith(beginning))
    if len(texts) == 1 and migration.config == "pretrain":
        migration.set(dataloader__text_column=texts[0])
    elif len(texts) == 1:
        migration.set(dataloader__columns=[f"text={texts[0]}"])
    elif texts:
        why = "one column has the text; rename them in the files to the same"
        row = Row("columns of the datasets", ", ".join(texts), "without a counterpart", why)
        migration.list_row(row)


def _sources(migration: Migration, key: str) -> tuple[list[str], list[str], set[str]]:
    """Return the datasets that a key names, the names that are not listed, and the columns that
    are renamed."""
    found = _known_datasets(migration)
    names: list[str] = []
    unknown: list[str] = []
    columns: set[str] = set()
    for name in _names(migration, key):
        if name not in found:
            unknown.append(name)
            names.append(name)
            continue
        entry, folder = found[name]
        if file := entry.get("file_name"):
            names.append(str(folder / file))
        else:
            hub = str(entry.get("hf_hub_url") or entry.get("ms_hub_url"))
            names.append(migration.dataset(hub, entry.get("subset"), None, entry.get("split")))
        renamed = entry.get("columns") or {}
        ours = {**_COLUMNS, **({"kto_tag": "label"} if migration.config.startswith("kto") else {})}
        columns |= {
            f"{ours[key]}={theirs}"
            for key, theirs in renamed.items()
            if key in ours and theirs != ours[key]
        }
    return names, unknown, columns


def _names(migration: Migration, key: str) -> list[str]:
    return [str(name) for name in as_list(migration.get(key) or [])]


def _known_datasets(migration: Migration) -> dict[str, tuple[dict[str, Any], Path]]:
    """Return name → entry of the list of datasets, and its folder; nothing without the list."""
    folder = Path(str(migration.get("dataset_dir", "data")))
    try:
        entries = json.loads((folder / _LIST).read_text())
    except (OSError, ValueError):
        return {}
    return {name: (entry, folder) for name, entry in entries.items() if isinstance(entry, dict)}


def _template(migration: Migration) -> None:
    name = migration.get("template")
    if name is None:
        return
    if name in _TEMPLATES:
        hugging_face.built_in_template(migration, "template", str(name))
    else:
        why = "the template in the model's folder, which templates there repeat"
        migration.take("template", "dataloader.chat_template", "", why)


def _adapters(migration: Migration) -> None:
    """Set rank and alpha, which is twice the rank by default."""
    rank = int(migration.get("lora_rank", 8))
    alpha = float(migration.get("lora_alpha", 2 * rank))
    migration.take("lora_rank", "model_converters.lora.rank", rank)
    migration.take("lora_alpha", "model_converters.lora.alpha", alpha)
    if migration.get("lora_target") is not None:
        hugging_face.target_modules(migration, "lora_target")


def _held_out(migration: Migration) -> list[str]:
    if migration.get("val_size"):
        migration.miss(
            "val_size",
            "all rows are trained on; write held-out rows to a file, and set --validator.enable "
            "--validator.dataset FILE",
        )
    if migration.get("eval_dataset") is None:
        return []
    names, unknown, _ = _sources(migration, "eval_dataset")
    why = f"{', '.join(unknown)}: write the path of each file" if unknown else ""
    migration.take("eval_dataset", "validator.dataset", names, why)
    return names


RULES: Mapping[str, Rule] = {
    **hugging_face.RULES,
    "cutoff_len": to("training.seq_len", int),
    **dict.fromkeys(
        ("image_max_pixels", "image_min_pixels"),
        missing("preprocessor_config.json in the model's folder has the sizes of images"),
    ),
    "video_max_pixels": missing("models are trained on texts and images, not on videos"),
    "max_samples": missing("the data is read in full; write the first rows to a file"),
    "adapter_name_or_path": to("model_converters.lora.adapter_path"),
    "additional_target": missing(hugging_face.WHOLE_LAYERS),
    "pref_ftx": missing("write the sum of both losses: loss.kind mix, loss.mix dpo=1 sft=WEIGHT"),
    **{
        f"use_{name}": missing(f"--optimizer.name has no {name}")
        for name in ("badam", "galore", "apollo", "adam_mini")
    },
    "plot_loss": unneeded("`torchtitan report` draws the curves"),
    "flash_attn": unneeded("attention of a packed window is exact without an option"),
    "enable_liger_kernel": unneeded("no loss here holds all logits"),
    "use_unsloth": unneeded("attention, norms and losses need no option here"),
    "quantization_method": unneeded("4 bits as nf4"),
    "quantization_type": unneeded("nf4"),
    "double_quantization": unneeded("always"),
    "upcast_layernorm": unneeded("norms are computed in float32"),
    "disable_gradient_checkpointing": to(
        "activation_checkpoint.mode", lambda value: "none" if value else "full"
    ),
    "kto_chosen_weight": to("loss.desirable_weight", float),
    "kto_rejected_weight": to("loss.undesirable_weight", float),
    "save_only_model": to("checkpoint.last_save_model_only"),
    "loraplus_lr_ratio": missing("a group of parameters has a rate of its own: param_groups"),
    "buffer_size": to("dataloader.shuffle_buffer", int),
    "streaming": hugging_face.streaming,
    "mask_history": to(
        "dataloader.train_on", lambda value: "last_assistant" if value else "assistant"
    ),
    "pure_bf16": to("training.dtype", lambda value: "bfloat16" if value else "float32"),
}

"""Recipe files of torchtune. Names and defaults come from its documented recipes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.migration import alignment, hugging_face
from torchtitan.config.migration.outcome import (
    Migration,
    Rule,
    as_list,
    missing,
    to,
    unneeded,
)
from torchtitan.tools.errors import UserError

DEFAULTS: Mapping[str, object] = {
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "epochs": 1,
    "optimizer.lr": 1e-3,
}

_DATASETS: Mapping[str, tuple[str, str, bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "", False),
    "chat_dataset": ("", "", False),
    "instruct_dataset": ("", "", False),
    "text_completion_dataset": ("", "", True),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "", False),
    "preference_dataset": ("", "", False),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", "", False),
}
"""Function of a dataset → its source, chat template (of the prompt that it writes), and whether it
trains on the prompt by default."""

_COLUMNS = {"instruct_dataset": {"input": "prompt", "output": "response"}}
"""Function of a dataset → name of a column there → here."""

_SOURCE_KEYS = ("source", "split", "name", "subset", "data_files")

_TARGETS = {"output_proj": "o_proj"}
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "PagedAdamW", "PagedAdamW8bit", "AdamW8bit")
_SECTIONS = {
    "profiler": "--profiling.enable_profiling",
    "metric_logger": "metrics are in --dump_folder",
    "checkpointer": "the folder names the files",
    "ref_checkpointer": "the reference is the model at the start",
    "tokenizer": "the folder of the model has the tokenizer",
}
"""Section that needs nothing → why."""

_LOSSES = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss")


def migrate_torchtune(migration: Migration) -> None:
    """Read a recipe's file."""
    model = _last(migration.get("model._component_"))
    loss = _last(migration.get("loss._component_"))
    if "vision" in model:
        raise UserError(f"model {model}: train it with --module auto --config lora_images")
    if migration.get("teacher_model._component_") is not None:
        raise UserError("the recipe distills a teacher; use --module distillation")
    if "policy_model._component_" in migration.given:
        raise UserError("the recipe is PPO's; use --module ppo (docs/post_training.md)")
    if not model or "optimizer._component_" not in migration.given:
        raise UserError("the recipe trains nothing: it has no model, or no optimizer")
    has_adapters = model.startswith(("lora_", "qlora_", "dora_", "qdora_"))
    in_4_bits = model.startswith("q") and has_adapters or migration.get("model.quantize_base")
    if has_adapters:
        migration.config = "qlora" if in_4_bits else "lora"
    if "dpo" in loss.lower():
        migration.module = "preference"
        migration.config = f"dpo_{migration.config}" if has_adapters else "dpo"
        migration.take("loss._component_", "loss.kind", "dpo")
        if migration.get("loss.beta") is not None:
            migration.take("loss.beta", "loss.beta", float(migration.get("loss.beta")))
        alignment.smoothing(migration, "loss.label_smoothing")
    elif loss:
        known = loss in _LOSSES
        note = migration.drop if known else migration.miss
        note("loss._component_", "the mean over trained tokens, without all logits in memory")
    _model(migration, model)
    if migration.has_adapters:
        _adapters(migration)
    _validation(migration)
    _data(migration)
    hugging_face.batch(migration, "batch_size", "gradient_accumulation_steps")
    _length(migration)
    _optimizer(migration)
    _schedule(migration)
    _precision(migration)
    migration.apply(RULES)
    _drop_sections(migration)
    hugging_face.finish_adapters(migration)


def resolved(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values with references such as `${output_dir}` replaced."""

    def replaced(value: object, depth: int = 0) -> object:
        if not isinstance(value, str) or depth > 8:
            return value
        found = re.sub(r"\$\{([\w.]+)\}", lambda match: str(values.get(match[1], match[0])), value)
        return found if found == value else replaced(found, depth + 1)

    return {key: replaced(value) for key, value in values.items()}


def _last(name: object) -> str:
    return str(name or "").rpartition(".")[2]


def _model(migration: Migration, model: str) -> None:
    key = "checkpointer.checkpoint_dir"
    folder = str(migration.get(key) or "")
    parts = [part for part in Path(folder).parts if part != "original"]
    path = str(Path(*parts)) if parts else ""
    if not path:
        raise UserError("the recipe has no checkpointer.checkpoint_dir, the folder of the model")
    why = "the folder above original, in Hugging Face's format" if "original" in folder else ""
    migration.take(key, "hf_assets_path", path, why)
    migration.drop("model._component_", f"config.json in {path} describes it")


def _adapters(migration: Migration) -> None:
    attention = [
        _TARGETS.get(name, name) for name in as_list(migration.get("model.lora_attn_modules") or [])
    ]
    mlp = migration.get("model.apply_lora_to_mlp")
    output = migration.get("model.apply_lora_to_output")
    names = attention + (["gate_proj", "up_proj", "down_proj"] if mlp else [])
    names += ["lm_head"] if output else []
    if names:
        option = "model_converters.lora.include"
        migration.set(model_converters__lora__include=names)
        for key in ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output"):
            if migration.get(f"model.{key}") is not None:
                migration.take(f"model.{key}", option, names, "all layers are named together")
    for theirs, ours, default in (
        ("lora_rank", "rank", 8),
        ("lora_alpha", "alpha", 16.0),
        ("lora_dropout", "dropout", 0.0),
        ("use_dora", "dora", False),
    ):
        if migration.get(f"model.{theirs}") is not None:
            migration.take(f"model.{theirs}", f"model_converters.lora.{ours}")
        else:
            migration.options[f"model_converters.lora.{ours}"] = default
    if migration.get("model.quantize_base") is not None:
        migration.change("model.quantize_base", f"--config {migration.config}")


def _data(migration: Migration) -> None:
    if isinstance(migration.get("dataset"), list):
        sets = migration.get("dataset")
        names = [name for one in sets for name in _sources(migration, one)]
        migration.change("dataset", "mixed by size", dataloader__dataset=names)
        functions = [_last(one.get("_component_")) for one in sets]
        migration.set(dataloader__packing="none")
    else:
        one = _section(migration, "dataset")
        functions = [_last(one.get("_component_"))]
        has_prompt = functions != ["instruct_dataset"]
        why = "" if has_prompt else "without a template there; here with the one of the folder"
        migration.change("dataset._component_", why, dataloader__dataset=_sources(migration, one))
        _options_of(migration, one)
    if migration.module == "auto":
        _, template, on_prompt = _DATASETS.get(functions[0], ("", "", False))
        trained = migration.get("dataset.train_on_input", on_prompt)
        migration.set(
            dataloader__train_on="all" if trained else "assistant",
            dataloader__too_long="truncate_right",
        )
        if migration.get("dataset.train_on_input") is not None:
            value = "all" if trained else "assistant"
            migration.take("dataset.train_on_input", "dataloader.train_on", value)
        if template:
            migration.set(dataloader__chat_template=template)
    length = migration.get("tokenizer.max_seq_len")
    if length is not None:
        migration.take("tokenizer.max_seq_len", "training.seq_len", int(length))
    else:
        why = "samples have no limit there; longer ones are cut, and counted"
        migration.change("tokenizer.max_seq_len", why, training__seq_len=2048)
    if migration.get("shuffle") is not None:
        migration.take("shuffle", "dataloader.sampler.shuffle")


def _section(migration: Migration, name: str) -> dict[str, Any]:
    keys = [key for key in migration.keys() if key.startswith(f"{name}.")]
    return {key.removeprefix(f"{name}."): migration.get(key) for key in keys}


def _validation(migration: Migration) -> None:
    """Read the data of validation, which has the format of the training data here."""
    held_out = _section(migration, "dataset_val")
    every = migration.get("run_val_every_n_steps")
    if not held_out:
        if every is not None:
            why = "name held-out data: --validator.enable --validator.dataset FILE"
            migration.miss("run_val_every_n_steps", why)
        return
    sources = _sources(migration, held_out)
    options = {"validator__enable": True, "validator__dataset": sources}
    migration.change("dataset_val._component_", "in the format of the training data", **options)
    for key in sorted(held_out.keys() - {"_component_"}):
        is_source = key.partition(".")[0] in _SOURCE_KEYS
        is_same = held_out[key] == migration.get(f"dataset.{key}")
        note = migration.drop if is_source or is_same else migration.miss
        why = "part of the name of the dataset" if is_source else "as of the training data"
        note(f"dataset_val.{key}", why)
    if every is not None:
        migration.take("run_val_every_n_steps", "validator.freq", int(every))


def _sources(migration: Migration, dataset: Mapping[str, Any]) -> list[str]:
    """Return the dataset strings of a section: its files, or its repository on the hub."""
    split = str(dataset.get("split") or "train")
    files = dataset.get("data_files") or dataset.get(f"data_files.{split.partition('[')[0]}")
    if not files:
        return [_source(migration, dataset)]
    return [migration.dataset(str(file), None, None, split) for file in as_list(files)]


def _source(migration: Migration, dataset: Mapping[str, Any]) -> str:
    function = _last(dataset.get("_component_"))
    source = dataset.get("source")
    name = str(source or _DATASETS.get(function, ("", "", False))[0])
    if not name:
        raise UserError(
            f"dataset {function}: no source; name the data with dataset.source, or convert the "
            "recipe's dataset to a file"
        )
    split = dataset.get("split")
    return migration.dataset(name, dataset.get("name") or dataset.get("subset"), None, split)


def _options_of(migration: Migration, dataset: Mapping[str, object]) -> None:
    packed = bool(dataset.get("packed"))
    if migration.module == "auto":
        migration.set(dataloader__packing="ffd" if packed else "none")
        if dataset.get("packed") is not None:
            value = "ffd" if packed else "none"
            migration.take("dataset.packed", "dataloader.packing", value)
    ours = _COLUMNS.get(_last(dataset.get("_component_")), {})
    named = {
        key.rpartition(".")[2]: value
        for key, value in dataset.items()
        if key.startswith("column_map.")
    }
    columns = [
        f"{ours.get(name, name)}={value}"
        for name, value in named.items()
        if ours.get(name, name) != value
    ]
    if dataset.get("column"):
        columns.append(f"text={dataset['column']}")
    if dataset.get("conversation_column") not in (None, "messages", "conversations"):
        columns.append(f"messages={dataset['conversation_column']}")
    if columns:
        migration.set(dataloader__columns=columns)
    for key in dataset:
        if key.partition(".")[0] in _SOURCE_KEYS:
            migration.drop(f"dataset.{key}", "part of the name of the dataset")
        elif key.startswith("column") or key in ("conversation_column", "conversation_style"):
            migration.change(f"dataset.{key}", "columns are renamed together")


def _length(migration: Migration) -> None:
    limit, epochs = migration.get("max_steps_per_epoch"), int(migration.get("epochs"))
    if limit is not None:
        steps = int(limit) * epochs
        why = f"times {epochs} epochs; an epoch with fewer steps ends earlier there"
        migration.change("max_steps_per_epoch", why, training__steps=steps)
        migration.drop("epochs", "max_steps_per_epoch limits them")
    else:
        migration.take("epochs", "training.epochs", epochs)
    norm = migration.get("clip_grad_norm")
    migration.set(training__max_norm=float(norm) if norm else float("inf"))
    if norm is not None:
        migration.take("clip_grad_norm", "training.max_norm", float(norm) if norm else float("inf"))


def _optimizer(migration: Migration) -> None:
    kind = _last(migration.get("optimizer._component_")) or "AdamW"
    name = kind.removeprefix("Paged")
    if kind in _OPTIMIZERS:
        why = "moments stay in GPU memory" if name != kind else ""
        if migration.has_adapters and name == "AdamW8bit":
            name, why = "AdamW", "moments of an adapter are small, and are kept in 32 bits"
        migration.take("optimizer._component_", "optimizer.name", name, why)
    else:
        migration.set(optimizer__name="AdamW")
        migration.miss("optimizer._component_", "the file has AdamW instead")
    migration.take("optimizer.lr", "optimizer.lr", float(migration.get("optimizer.lr")))
    adamw = kind.endswith(("AdamW", "AdamW8bit"))
    value = float(migration.get("optimizer.weight_decay", 0.01 if adamw else 0.0))
    migration.set(optimizer__weight_decay=value, optimizer__beta1=0.9, optimizer__beta2=0.999)
    if migration.get("optimizer.weight_decay") is not None:
        migration.take("optimizer.weight_decay", "optimizer.weight_decay", value)
    if not migration.has_adapters:
        migration.set(optimizer__param_groups__no_decay__weight_decay=value)
    if migration.get("optimizer.betas") is not None:
        one, two = migration.get("optimizer.betas")
        migration.change("optimizer.betas", "", optimizer__beta1=one, optimizer__beta2=two)


def _schedule(migration: Migration) -> None:
    name = _last(migration.get("lr_scheduler._component_"))
    migration.set(
        lr_scheduler__warmup_steps=0,
        lr_scheduler__warmup_from_zero=True,
        lr_scheduler__min_lr_factor=0.0,
    )
    if not name:
        migration.set(lr_scheduler__decay_ratio=0.0)
        return
    if name == "get_cosine_schedule_with_warmup":
        migration.take("lr_scheduler._component_", "lr_scheduler.decay_type", "cosine")
        migration.set(lr_scheduler__decay_ratio=None)
    else:
        migration.set(lr_scheduler__decay_ratio=None, lr_scheduler__decay_type="cosine")
        migration.miss("lr_scheduler._component_", "the file has a cosine instead")
    cycles = migration.get("lr_scheduler.num_cycles")
    if cycles is not None:
        note = migration.drop if float(cycles) == 0.5 else migration.miss
        note("lr_scheduler.num_cycles", "half a cosine, from the rate to its end")
    if migration.get("lr_scheduler.num_warmup_steps") is not None:
        migration.take(
            "lr_scheduler.num_warmup_steps",
            "lr_scheduler.warmup_steps",
            int(migration.get("lr_scheduler.num_warmup_steps")),
        )


def _precision(migration: Migration) -> None:
    name = {"bf16": "bfloat16", "fp32": "float32"}.get(str(migration.get("dtype")), "bfloat16")
    if migration.get("dtype") is None:
        return
    trained = {} if migration.has_adapters else {"training__dtype": name}
    migration.change("dtype", "", training__mixed_precision_param=name, **trained)


def _logger(migration: Migration, key: str) -> None:
    name = _last(migration.get(key))
    if name == "WandBLogger":
        migration.take(key, "metrics.enable_wandb", True)
    elif name == "TensorBoardLogger":
        migration.take(key, "metrics.enable_tensorboard", True)
    else:
        migration.drop(key, "metrics.jsonl is always written")


def _drop_sections(migration: Migration) -> None:
    output = "checkpointer.output_dir"
    if "dump_folder" not in migration.options and migration.get(output) is not None:
        migration.take(output, "dump_folder", str(migration.get(output)))
    for key in migration.keys():
        if key.startswith(tuple(f"{section}." for section in _SECTIONS)):
            migration.drop(key, _SECTIONS[key.partition(".")[0]])


RULES: Mapping[str, Rule] = {
    "output_dir": to("dump_folder"),
    "seed": to("debug.seed"),
    "compile": to("compile.enable"),
    "log_every_n_steps": to("metrics.log_freq", int),
    "enable_activation_checkpointing": hugging_face.recompute,
    "enable_activation_offloading": missing("--training.enable_cpu_offload moves weights"),
    "optimizer_in_bwd": to("optimizer.early_step_in_backward"),
    "fsdp_cpu_offload": to("training.enable_cpu_offload"),
    "optimizer.fused": unneeded("the default, --optimizer.implementation"),
    "metric_logger._component_": _logger,
    "log_peak_memory_stats": unneeded("memory is always logged"),
    "log_level": unneeded("the log needs no option"),
    "device": unneeded("a GPU if there is one"),
    "resume_from_checkpoint": unneeded("a run with the same --dump_folder resumes"),
    "save_adapter_weights_only": to("checkpoint.save_trainable_only"),
    "custom_sharded_layers": unneeded("FSDP shards embedding and head too"),
    "tensor_parallel_dim": to("parallelism.tensor_parallel_degree", int),
    "context_parallel_dim": to("parallelism.context_parallel_degree", int),
    "data_parallel_shard_dim": to("parallelism.data_parallel_shard_degree", int),
    "data_parallel_replicate_dim": to("parallelism.data_parallel_replicate_degree", int),
    "loss.num_output_chunks": unneeded("no loss here holds all logits"),
    "loss.ignore_index": unneeded("untrained labels are ignored"),
    "batch_size_val": unneeded("--training.local_batch_size holds for validation"),
    "dataset.new_system_prompt": missing("write the system message to the rows"),
    "tensor_parallel_plan._component_": unneeded("each family has its plan"),
    "quantizer._component_": missing("a configuration with QAT (docs/quantization.md)"),
    "quantizer.groupsize": missing("--model_converters.qat, of a configuration with QAT"),
    "ac_mode": to("activation_checkpoint.mode"),
    "ac_option": to("activation_checkpoint.selective_option", str),
    "dataset.add_eos": unneeded("documents end with the end token"),
    "collate_fn": unneeded("windows always have the same length"),
}

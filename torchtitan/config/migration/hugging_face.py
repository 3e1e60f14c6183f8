"""Arguments of transformers' `TrainingArguments`, which TRL, axolotl and LLaMA-Factory share.

Names and defaults come from the documentation of transformers 5, TRL 1.16 and PEFT 0.21.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config.migration.outcome import (
    Migration,
    Row,
    Rule,
    as_list,
    missing,
    to,
    unneeded,
)

TRAINING_DEFAULTS: Mapping[str, object] = {
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "seed": 42,
}
"""Values that `TrainingArguments` uses and ours differ from."""

_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "adamw_torch_xla",
    "adamw_anyprecision",
)
_PAGED = ("paged_adamw", "paged_adamw_32bit")
_IN_8_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")

_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"decay_type": "linear"},
    "cosine": {"decay_type": "cosine"},
    "constant": {"decay_ratio": 0.0},
    "constant_with_warmup": {"decay_ratio": 0.0},
    "cosine_with_min_lr": {"decay_type": "cosine"},
}
"""Name of a schedule → our options, besides `min_lr_factor`."""


def batch(migration: Migration, micro: str, accumulation: str) -> None:
    """Set the windows per device, and the global batch that accumulation and devices make of
    them."""
    size = int(migration.get(micro, 1))
    passes = migration.get(accumulation, 1)
    passes = 1 if passes == "auto" else int(passes)
    total = size * passes * migration.devices
    migration.take(micro, "training.local_batch_size", size)
    devices = f" x {migration.devices} devices" if migration.devices > 1 else ""
    migration.change(accumulation, f"{size} x {passes}{devices}", training__global_batch_size=total)


def length(migration: Migration, epochs: str, steps: str = "max_steps") -> None:
    """Set the length of the run, in steps if they are given, else in passes over the data."""
    n_steps, n_epochs = migration.get(steps), migration.get(epochs)
    if n_steps is not None and int(n_steps) > 0:
        migration.take(steps, "training.steps", int(n_steps))
        if n_epochs is not None:
            migration.drop(epochs, f"{steps} takes precedence")
        return
    if n_steps is not None:
        migration.drop(steps, "it is off")
    if n_epochs is None:
        return
    if float(n_epochs) != int(float(n_epochs)):
        whole = max(1, round(float(n_epochs)))
        why = "passes are whole numbers; or set --training.steps"
        migration.change(epochs, why, training__epochs=whole)
    else:
        migration.take(epochs, "training.epochs", int(float(n_epochs)))


def schedule(migration: Migration, key: str = "lr_scheduler_type") -> None:
    """Set the curve of the learning rate and its warm-up, which begins with a step of rate 0."""
    name = str(migration.get(key))
    migration.set(lr_scheduler__warmup_from_zero=True, lr_scheduler__min_lr_factor=0.0)
    if name == "warmup_stable_decay":
        _stable_and_decay(migration, key)
    elif name not in _SCHEDULES:
        migration.set(lr_scheduler__decay_type="cosine")
        migration.miss(key, "the file has a cosine instead, which --lr_scheduler.decay_type sets")
    else:
        options = {f"lr_scheduler__{part}": value for part, value in _SCHEDULES[name].items()}
        ends_at_zero = not name.startswith("constant") and not _floors(migration)
        floor = {"lr_scheduler__min_lr_factor": 0.0} if ends_at_zero else {}
        migration.change(key, "it ends at rate 0" if floor else "", **floor, **options)
    _floor(migration)
    _warmup(migration, is_off=name == "constant")


def _stable_and_decay(migration: Migration, key: str) -> None:
    """Set the decay at the end of the run, whose length in steps transformers has."""
    prefix = "lr_scheduler_kwargs."
    n_decay, n_steps = migration.get(f"{prefix}num_decay_steps"), migration.get("max_steps")
    curve = str(migration.get(f"{prefix}decay_type", "cosine"))
    options: dict[str, object] = {}
    if curve in ("linear", "cosine"):
        options = {"lr_scheduler__decay_type": curve}
        if migration.get(f"{prefix}decay_type") is not None:
            migration.take(f"{prefix}decay_type", "lr_scheduler.decay_type", curve)
    # hugging_face.length has read max_steps.
    n_steps = migration.options.get("training.steps") if n_steps is None else n_steps
    if n_decay is None or n_steps is None or int(n_steps) < int(n_decay) or not options:
        migration.set(lr_scheduler__decay_ratio=0.0)
        migration.miss(key, "the file has a constant rate; set --lr_scheduler.decay_ratio")
        return
    ratio = int(n_decay) / int(n_steps)
    migration.change(key, "", lr_scheduler__decay_ratio=ratio, **options)
    migration.take(f"{prefix}num_decay_steps", "lr_scheduler.decay_ratio", ratio)


def _floors(migration: Migration) -> dict[str, float]:
    """Return the keys that state the lowest rate, with its fraction of the highest."""
    rate = float(migration.get("learning_rate") or 1)
    factors = {
        "lr_scheduler_kwargs.min_lr_rate": 1.0,
        "lr_scheduler_kwargs.min_lr_ratio": 1.0,
        "lr_scheduler_kwargs.min_lr": 1 / rate,
        "cosine_min_lr_ratio": 1.0,
    }
    return {
        key: float(value) * factor
        for key, factor in factors.items()
        if (value := migration.get(key)) is not None
    }


def _floor(migration: Migration) -> None:
    for key, value in _floors(migration).items():
        migration.take(key, "lr_scheduler.min_lr_factor", value)


def _warmup(migration: Migration, *, is_off: bool) -> None:
    steps, ratio = (migration.get(f"warmup_{unit}") for unit in ("steps", "ratio"))
    if is_off:
        migration.set(lr_scheduler__warmup_steps=0)
        for unit, value in (("steps", steps), ("ratio", ratio)):
            if value is not None:
                migration.drop(f"warmup_{unit}", "the schedule constant has no warm-up")
    elif steps:
        is_ratio = float(steps) < 1
        option = "lr_scheduler.warmup_ratio" if is_ratio else "lr_scheduler.warmup_steps"
        migration.take("warmup_steps", option, float(steps) if is_ratio else int(steps))
        if ratio is not None:
            migration.drop("warmup_ratio", "warmup_steps takes precedence")
    else:
        if steps is not None:
            migration.drop("warmup_steps", "it is off")
        if ratio:
            migration.take("warmup_ratio", "lr_scheduler.warmup_ratio", float(ratio))
        else:
            migration.set(lr_scheduler__warmup_steps=0)


def optimizer(migration: Migration, key: str = "optim") -> None:
    """Set the optimizer. Moments in 8 bits are kept for whole models only, since an
    adapter has few."""
    name = str(migration.get(key))
    if name in _ADAMW:
        migration.take(key, "optimizer.name", "AdamW")
    elif name in _PAGED:
        why = "moments stay in GPU memory; AdamWOffload keeps them in CPU memory"
        migration.take(key, "optimizer.name", "AdamW", why)
    elif name in _IN_8_BITS and migration.has_adapters:
        why = "moments of an adapter are small, and are kept in 32 bits"
        migration.take(key, "optimizer.name", "AdamW", why)
    elif name in _IN_8_BITS:
        why = "of torchao, which the extra quantization installs"
        migration.take(key, "optimizer.name", "AdamW8bit", why)
    elif name in ("sgd", "muon"):
        migration.take(key, "optimizer.name", {"sgd": "SGD", "muon": "Muon"}[name])
    else:
        migration.set(optimizer__name="AdamW")
        migration.miss(key, "the file has AdamW instead; its learning rate may differ")


def decay(migration: Migration) -> None:
    """Set the weight decay, which transformers also applies to embeddings."""
    value = float(migration.get("weight_decay", 0.0))
    migration.take("weight_decay", "optimizer.weight_decay", value)
    if value and not migration.has_adapters:
        migration.set(optimizer__param_groups__no_decay__pattern="norm|bias")


def precision(migration: Migration) -> None:
    """Set the type of the computation."""
    in_bfloat16 = migration.get("bf16") in (True, "auto", "full")
    if migration.get("fp16") and migration.get("bf16") is not None and not in_bfloat16:
        migration.drop("bf16", "it is off")
    for key in ("bf16", "fp16"):
        value = migration.get(key)
        if value is None:
            continue
        if key == "bf16":
            name = "bfloat16" if in_bfloat16 else "float32"
            migration.take(key, "training.mixed_precision_param", name)
        elif value:
            migration.take(key, "training.mixed_precision_param", "float16")
        else:
            migration.drop(key, "it is off")
    for key in ("torch_dtype", "dtype"):
        if migration.get(key) is not None:
            migration.drop(key, "weights that are trained are kept in float32; --training.dtype")


def saving(migration: Migration) -> None:
    """Set when checkpoints are saved."""
    strategy, steps = migration.get("save_strategy"), migration.get("save_steps")
    if strategy in ("no", "epoch", "best"):
        why = "the last step is always saved; set --checkpoint.interval for more"
        migration.change("save_strategy", why, checkpoint__interval=1_000_000)
        if steps is not None:
            migration.drop("save_steps", f"save_strategy is {strategy}")
        return
    if strategy is not None:
        migration.drop("save_strategy", "the only way")
    if steps is not None and float(steps) >= 1:
        migration.take("save_steps", "checkpoint.interval", int(steps))
    elif steps is not None:
        migration.miss("save_steps", "a part of the run; set --checkpoint.interval in steps")


def evaluation(migration: Migration, held_out: Sequence[str] = ()) -> None:
    """Set validation on the datasets `held_out`, if there are some."""
    keys = ("eval_strategy", "evaluation_strategy", "do_eval")
    wanted = {key: migration.get(key) for key in keys if migration.get(key) is not None}
    is_on = any(value not in ("no", False) for value in wanted.values())
    steps = migration.get("eval_steps")
    for key, value in wanted.items():
        if value in ("no", False) or held_out:
            migration.take(key, "validator.enable", value not in ("no", False))
        else:
            migration.miss(key, "name held-out data: --validator.enable --validator.dataset FILE")
    if is_on and held_out:
        migration.set(validator__enable=True, validator__dataset=list(held_out))
    if steps is not None and float(steps) >= 1:
        migration.take("eval_steps", "validator.freq", int(steps))
    elif steps is not None:
        migration.miss("eval_steps", "a part of the run; set --validator.freq in steps")


def report_to(migration: Migration, key: str) -> None:
    """Set where metrics go."""
    sinks = {str(name).lower() for name in as_list(migration.get(key))}
    names = ("wandb", "mlflow", "trackio", "tensorboard")
    known = {**{name: f"enable_{name}" for name in names}, "all": "enable_wandb"}
    options = {f"metrics__{known[name]}": True for name in sorted(sinks & set(known))}
    others = sorted(sinks - set(known) - {"none"})
    if others:
        migration.set(**options)
        migration.miss(key, f"{', '.join(others)}; metrics.jsonl is always written")
    elif options:
        migration.change(key, "metrics.jsonl is always written", **options)
    else:
        migration.drop(key, "it is off; metrics.jsonl is always written")


def recompute(migration: Migration, key: str) -> None:
    """Set activation checkpointing."""
    is_on = migration.get(key) not in (False, "false")
    migration.take(key, "activation_checkpoint.mode", "full" if is_on else "none")


def target_modules(migration: Migration, key: str) -> None:
    """Set the layers with adapters. Both libraries' names of layers are accepted here."""
    names = as_list(migration.get(key))
    if names in (["all-linear"], ["all"], ["linear"]):
        migration.drop(key, "all linear layers in the blocks, the default")
    else:
        migration.take(key, "model_converters.lora.include", [str(name) for name in names])


_CHATML = ("<|im_start|>", "<|im_end|>")


def built_in_template(migration: Migration, key: str, name: str) -> None:
    """Write conversations with a built-in template. The tokens of chatml are added to vocabularies
    that lack them, as most of the models that it is chosen for do."""
    why = ""
    if name == "chatml":
        add_tokens(migration, _CHATML)
        why = f"{' and '.join(_CHATML)} are added to a vocabulary that lacks them"
        why += "; adapters leave their embeddings as they are" * migration.has_adapters
    migration.take(key, "dataloader.chat_template", name, why)


def add_tokens(migration: Migration, tokens: Sequence[str]) -> list[str]:
    """Add tokens to the vocabulary, and return all that are added."""
    before = migration.options.get("tokenizer.added_tokens", [])
    added = list(dict.fromkeys([*before, *tokens]))
    migration.set(tokenizer__added_tokens=added)
    return added


def streaming(migration: Migration, key: str) -> None:
    if migration.get(key):
        migration.take(key, "dataloader.stream", "all")
    else:
        migration.drop(key, "it is off")


def learning_rate(migration: Migration, key: str) -> None:
    migration.take(key, "optimizer.lr", float(migration.get(key)))


SHARDING = "FSDP shards the weights over all processes by default (NGPU=8)"
_KERNELS = "attention, norms and losses need no option here"
_HUB = "`torchtitan push` publishes a model"
WHOLE_LAYERS = (
    "no layer is trained whole next to adapters; if the head is not tied to the embedding, "
    "adapt both: name them in --model_converters.lora.include, after the layers that are adapted"
)

RULES: Mapping[str, Rule] = {
    "learning_rate": learning_rate,
    "report_to": report_to,
    "gradient_checkpointing": recompute,
    "output_dir": to("dump_folder"),
    "logging_steps": to("metrics.log_freq", lambda value: max(1, int(float(value)))),
    "seed": to("debug.seed"),
    "max_grad_norm": to("training.max_norm", float),
    "adam_beta1": to("optimizer.beta1", float),
    "adam_beta2": to("optimizer.beta2", float),
    "adam_epsilon": to("optimizer.eps", float),
    "load_best_model_at_end": to("checkpoint.keep_best"),
    "logging_first_step": unneeded("the first step is always logged"),
    "logging_strategy": unneeded("by steps, the only way"),
    "logging_dir": unneeded("metrics are in --dump_folder"),
    "log_level": unneeded("the log needs no option"),
    "run_name": unneeded("set WANDB_NAME in the environment"),
    "do_train": unneeded("the command `torchtitan train` trains"),
    "overwrite_output_dir": unneeded("a run is never overwritten; choose another --dump_folder"),
    "overwrite_cache": unneeded("caches follow the data"),
    "resume_from_checkpoint": unneeded("a run with the same --dump_folder resumes"),
    "per_device_eval_batch_size": unneeded("--training.local_batch_size holds for validation"),
    "ddp_timeout": unneeded("--comm.train_timeout_seconds"),
    "ddp_find_unused_parameters": unneeded("found by name"),
    "dataloader_num_workers": to("dataloader.num_workers"),
    "dataloader_pin_memory": unneeded("batches are copied while the last one is computed"),
    "dataloader_drop_last": unneeded("a last batch is never dropped"),
    "preprocessing_num_workers": unneeded("all cores tokenize"),
    "dataset_num_proc": unneeded("all cores tokenize"),
    "remove_unused_columns": unneeded("unread columns are ignored"),
    "group_by_length": missing("packing fills windows instead: --dataloader.packing"),
    "length_column_name": unneeded("samples are counted"),
    "average_tokens_across_devices": unneeded("a loss is a mean over all tokens of a step"),
    "include_num_input_tokens_seen": unneeded("tokens are always counted"),
    "trust_remote_code": unneeded("if a model's code must run, set TORCHTITAN_TRUST_REMOTE_CODE=1"),
    "attn_implementation": unneeded(_KERNELS),
    "use_liger_kernel": unneeded(_KERNELS),
    "tf32": unneeded("--training.mixed_precision_param sets the type"),
    "use_cache": unneeded("no cache in training"),
    "gradient_checkpointing_kwargs.use_reentrant": unneeded("always without reentry"),
    "deepspeed": unneeded(SHARDING),
    "fsdp": unneeded(SHARDING),
    "torch_compile": to("compile.enable"),
    "torch_compile_backend": to("compile.backend"),
    "push_to_hub": missing(_HUB),
    "hub_model_id": missing(_HUB),
    "hub_strategy": unneeded(_HUB),
    "hub_private_repo": unneeded(_HUB),
    "metric_for_best_model": unneeded("the validation loss"),
    "greater_is_better": unneeded("the validation loss"),
    "neftune_noise_alpha": missing("no noise on embeddings"),
    "lora_target_modules": target_modules,
    "lora_alpha": to("model_converters.lora.alpha", float),
    "lora_r": to("model_converters.lora.rank", int),
    "lora_rank": to("model_converters.lora.rank", int),
    "lora_dropout": to("model_converters.lora.dropout", float),
    "use_dora": to("model_converters.lora.dora"),
    "use_rslora": to("model_converters.lora.rslora"),
    "lora_modules_to_save": missing(WHOLE_LAYERS),
    "lora_task_type": unneeded("a language model"),
}
"""Keys that need only themselves."""


_LORA = "model_converters.lora."
_OUTSIDE_BLOCKS = {"lm_head", "embed_tokens"}


def _drop_dropout(migration: Migration) -> None:
    """Train adapters without dropout, since adapters of the head and embedding cannot have it."""
    option = f"{_LORA}dropout"
    if not (value := migration.options.get(option)):
        return
    migration.options[option] = 0.0
    of_dropout = [row for row in migration.rows if row.note.startswith(f"{option}:")]
    migration.rows = [row for row in migration.rows if row not in of_dropout]
    key = of_dropout[0].key if of_dropout else "lora_dropout (default)"
    why = "adapters of the head and the embedding take no dropout, and so the others get none"
    migration.rows.append(Row(key, str(value), "without a counterpart", why))


def finish_adapters(migration: Migration) -> None:
    """Adapt the new head of a reward model too, and rename the options of adapters for the
    configuration that keeps the weights in 4 bits."""
    layers = migration.options.get(include := f"{_LORA}include")
    has_new_head = migration.module == "reward" and migration.has_adapters
    if has_new_head and layers is not None:
        migration.options[include] = [*layers, r"^head\.output$"]
    if has_new_head or _OUTSIDE_BLOCKS & {*(layers or [])}:
        _drop_dropout(migration)
    if "qlora" in migration.config:
        migration.options = {
            key.replace(_LORA, "model_converters.qlora."): value
            for key, value in migration.options.items()
        }
        migration.rows = [
            row._replace(note=row.note.replace(_LORA, "model_converters.qlora."))
            for row in migration.rows
        ]

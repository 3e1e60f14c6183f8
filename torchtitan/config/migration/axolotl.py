"""Files of axolotl. Names and defaults come from its configuration reference."""

from collections.abc import Mapping, Sequence

from torchtitan.config.migration import alignment, hugging_face
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
    "lr_scheduler": "cosine",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "optimizer": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "num_epochs": 1,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "sequence_len": 512,
    "seed": 42,
    "sample_packing": False,
}

_METHODS = {
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo"), "dpo"),
    "kto": "kto",
    "grpo": "grpo",
}
"""Value of rl → method; its losses of pairs are kinds of DPO's loss."""
_TEMPLATES = ("chatml", "llama3", "alpaca")
_OWN_TEMPLATE = ("tokenizer_default", "tokenizer_default_fallback_chatml")
_FIELDS = {
    "field_messages": "messages",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field": "text",
    "text_column": "text",
}
_OF_DATASET = ("path", "name", "revision", "split", "type", "data_files", "ds_type")
_HARMLESS = (
    "roles",
    "message_property_mappings",
    "message_field_role",
    "message_field_content",
    "conversation",
    "trust_remote_code",
    "preprocess_shards",
    "roles_to_train",
    "train_on_eos",
)


def migrate_axolotl(migration: Migration) -> None:
    """Read a file of axolotl."""
    for key in ("datasets", "pretraining_dataset"):
        migration.gather(key)  # of one dataset that is written as a mapping
    method = _select(migration)
    migration.use_model("base_model", str(migration.get("revision_of_model") or ""))
    if migration.get("revision_of_model") is not None:
        migration.drop("revision_of_model", "the command of the download has it")
    _data(migration)
    _batch(migration, method)
    hugging_face.length(migration, "num_epochs")
    _default_warmup(migration)
    hugging_face.schedule(migration, "lr_scheduler")
    hugging_face.optimizer(migration, "optimizer")
    hugging_face.decay(migration)
    hugging_face.precision(migration)
    hugging_face.saving(migration)
    hugging_face.evaluation(migration, _held_out(migration))
    migration.apply(RULES)
    hugging_face.finish_adapters(migration)


def _batch(migration: Migration, method: str) -> None:
    keys = ("micro_batch_size", "gradient_accumulation_steps")
    if method == "grpo":
        for key, value in alignment.GRPO_DEFAULTS.items():
            migration.default(f"trl.{key}", value)
        alignment.group_batch(migration, *keys, alignment.grpo(migration, "trl."))
    elif migration.get("batch_size") is not None and "micro_batch_size" in migration.given:
        size = int(migration.get("batch_size"))
        migration.take("micro_batch_size", "training.local_batch_size")
        migration.drop("gradient_accumulation_steps", "batch_size is given")
        migration.take("batch_size", "training.global_batch_size", size * migration.devices)
    else:
        hugging_face.batch(migration, *keys)


def _select(migration: Migration) -> str:
    """Choose the configuration, and return the method."""
    adapter, loss = migration.get("adapter"), migration.get("rl")
    if adapter not in (None, False, "lora", "qlora"):
        raise UserError(f"adapter {adapter}: adapters here are lora and qlora")
    if loss is not None and loss not in _METHODS:
        raise UserError(f"rl {loss}: methods here are {', '.join(_METHODS)}")
    if migration.get("process_reward_model"):
        raise UserError(
            "process_reward_model: reward models here rate whole answers, and no steps; "
            "reward_model: true is such a model"
        )
    method = "reward" if migration.get("reward_model") else _METHODS.get(loss, "sft")
    in_4_bits = adapter == "qlora" or bool(adapter and migration.get("load_in_4bit"))
    images = migration.get("processor_type") is not None
    alignment.select(migration, method, adapters=bool(adapter), in_4_bits=in_4_bits, images=images)
    if method == "sft" and not adapter and migration.get("pretraining_dataset") is not None:
        migration.config = "pretrain"
    if images:
        migration.change(
            "processor_type", f"--module {migration.module} --config {migration.config_name}"
        )
    for key in ("rl", "reward_model"):
        if migration.get(key):
            migration.change(key, f"--module {migration.module} --config {migration.config_name}")
        elif migration.get(key) is not None:
            migration.drop(key, "it is off")
    if adapter == "qlora" and "qlora" not in migration.config:
        migration.miss("adapter", f"weights of {migration.config_name} are not kept in 4 bits")
    elif adapter is not None:
        alignment.note_adapters(migration, "adapter", wanted=bool(adapter))
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if migration.get(key) is not None:
            alignment.note_bits(migration, key, bits=bits * bool(migration.get(key)))
    _preference_loss(migration, str(loss), method)
    return method


def _preference_loss(migration: Migration, loss: str, method: str) -> None:
    """Set the loss of pairs. TRL, which axolotl calls, has a beta of 0.1 and a gamma of 0.5."""
    for key, value in {"rl_beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0}.items():
        migration.default(key, value)
    if method == "dpo":
        migration.set(loss__kind=loss)
    if loss == "orpo":
        key = "orpo_alpha" if migration.get("orpo_alpha") is not None else "rl_beta"
        alignment.orpo_weight(migration, key)
    elif method in ("dpo", "kto"):
        migration.take("rl_beta", "loss.beta", float(migration.get("rl_beta")))
    if loss == "simpo":
        gamma = float(migration.get("simpo_gamma"))
        migration.take("simpo_gamma", "loss.gamma", gamma)
        if migration.get("cpo_alpha") != 0:
            migration.miss("cpo_alpha", "the likelihood of chosen answers is not added")


def _data(migration: Migration) -> None:
    key = next((k for k in ("datasets", "pretraining_dataset") if migration.get(k)), "")
    if not key:
        raise UserError("the file has neither datasets nor pretraining_dataset")
    sets = migration.get(key)
    sets = [sets] if isinstance(sets, (str, Mapping)) else list(sets)
    sets = [{"path": one} if isinstance(one, str) else dict(one) for one in sets]
    if unread := [one for one in sets if _kind(one) == "input_output"]:
        raise UserError(
            f"type input_output of {unread[0].get('path')}: segments are not read; write each row "
            "as prompt and completion, and migrate it without this type"
        )
    names = [name for one in sets for name in _names(migration, one)]
    columns = sorted({column for one in sets for column in _columns(one)})
    if migration.config == "pretrain":
        columns = _text_column(migration, sets)
    unread = sorted(
        {field for one in sets for field in one}
        - set(_OF_DATASET)
        - set(_HARMLESS)
        - set(_FIELDS)
        - {"chat_template"}
    )
    migration.set(dataloader__dataset=names)
    if columns:
        migration.set(dataloader__columns=columns)
    if "shards" in unread:
        migration.miss(key, "shards: data is read in full")
    else:
        why = f"not read: {', '.join(unread)}" if unread else "formats are found by the columns"
        migration.change(key, why, dataloader__dataset=names)
    if migration.config == "pretrain":
        migration.drop("sample_packing", "documents always fill windows")
        return
    for one in sets:
        _list_prompt(migration, one)
    _template(migration, [_kind(one) for one in sets])
    is_packed = bool(migration.get("sample_packing"))
    if migration.module == "auto":
        migration.take("sample_packing", "dataloader.packing", "ffd" if is_packed else "none")
    elif is_packed and migration.module != "rl":
        why = "a batch counts pairs"
        migration.take("sample_packing", "dataloader.packing", "none", why)
    else:
        migration.drop("sample_packing", "it is off")
    if migration.get("train_on_inputs") is not None and migration.module != "auto":
        migration.drop("train_on_inputs", "only answers are compared")
    elif migration.get("train_on_inputs") is not None:
        value = "all" if migration.get("train_on_inputs") else "assistant"
        migration.take("train_on_inputs", "dataloader.train_on", value)


def _text_column(migration: Migration, sets: Sequence[Mapping[str, object]]) -> list[str]:
    """Set the column of pre-training's text, and return the columns to rename: none."""
    named = {one.get("text_column") or one.get("field") or "text" for one in sets}
    if len(named) == 1:
        migration.set(dataloader__text_column=str(*named))
    else:
        why = "one column has the text; rename them in the files to the same"
        listed = ", ".join(sorted(map(str, named)))
        migration.list_row(Row("text columns", listed, "without a counterpart", why))
    return []


def _list_prompt(migration: Migration, dataset: Mapping[str, object]) -> None:
    """List a prompt that is written in place, which the template replaces."""
    kind = dataset.get("type")
    parts = ("format", "no_input_format", "system_prompt", "system_format")
    written = [part for part in parts if isinstance(kind, Mapping) and kind.get(part)]
    if written:
        why = "the template writes the prompt; write yours to a file: --dataloader.chat_template"
        listed = ", ".join(written)
        label = f"type of {dataset.get('path')}"
        migration.list_row(Row(label, listed, "without a counterpart", why))


def _kind(dataset: Mapping[str, object]) -> str:
    kind = dataset.get("type") or ""
    return "custom" if isinstance(kind, Mapping) else str(kind)


def _names(migration: Migration, dataset: Mapping[str, object]) -> list[str]:
    """Return the dataset strings: of the data files, or of the folder or repository."""
    path = str(dataset.get("path"))
    if dataset.get("data_files") and path in ("json", "csv", "parquet", "text", "arrow"):
        return [str(file) for file in as_list(dataset["data_files"])]
    name, revision, split = (dataset.get(part) for part in ("name", "revision", "split"))
    return [migration.dataset(path, name, revision, split)]


def _columns(dataset: Mapping[str, object]) -> list[str]:
    """Return the columns that are renamed, also for a type that is described in place."""
    kind = dataset.get("type")
    fields = {**dataset, **(kind if isinstance(kind, Mapping) else {})}
    return [
        f"{ours}={fields[theirs]}"
        for theirs, ours in _FIELDS.items()
        if fields.get(theirs) and fields[theirs] not in (ours, "conversations")
    ]


def _template(migration: Migration, kinds: list[str]) -> None:
    name = migration.get("chat_template")
    of_pairs = {kind.partition(".")[0] for kind in kinds}  # as in chatml.intel
    if name is None and len(of_pairs) == 1 and (named := of_pairs & {"chatml", "llama3"}):
        migration.default("chat_template", name := named.pop())
    instructs = [kind for kind in kinds if kind.startswith("alpaca")]
    if name is None and instructs:
        migration.default("chat_template", "alpaca")
        if len(instructs) == len(kinds):
            why = "for the datasets of this type"
            migration.take("chat_template", "dataloader.chat_template", "alpaca", why)
        else:
            migration.miss(
                "chat_template",
                f"datasets of type {', '.join(sorted(set(instructs)))} are written by the template "
                "in the model's folder, as the others: a run has one template; to keep "
                "Alpaca's, fine-tune on them in a run of their own",
            )
    elif name is None:
        return
    elif name in _TEMPLATES:
        hugging_face.built_in_template(migration, "chat_template", str(name))
    elif str(name).startswith("mistral"):
        migration.take("chat_template", "dataloader.chat_template", "mistral")
    elif name in _OWN_TEMPLATE:
        migration.drop("chat_template", "the template in the model's folder is the default")
    else:
        why = "the template in the model's folder"
        migration.take("chat_template", "dataloader.chat_template", "", why)


def _default_warmup(migration: Migration) -> None:
    """axolotl's warm-up without options is 3% of the steps, at most 100."""
    if migration.get("warmup_steps") is None and migration.get("warmup_ratio") is None:
        migration.set(lr_scheduler__warmup_ratio=0.03)
        migration.change(
            "warmup_ratio",
            "axolotl's default, which is at most 100 steps there",
            lr_scheduler__warmup_ratio=0.03,
        )


def _held_out(migration: Migration) -> list[str]:
    """Read the held-out data, and return its names; none for a part of the training data."""
    if size := migration.get("val_set_size"):
        migration.miss(
            "val_set_size",
            f"all rows are trained on; write {size} of them to a file of its own, and set "
            "--validator.enable --validator.dataset FILE",
        )
    elif "val_set_size" in migration.given:
        migration.drop("val_set_size", "it is off")
    if sets := migration.get("test_datasets"):
        names = [name for one in sets for name in _names(migration, one)]
        why = "rows in the format of the training data"
        migration.change("test_datasets", why, validator__enable=True, validator__dataset=names)
        return names
    return []


def _labels(migration: Migration, key: str) -> None:
    if migration.module == "reward" and migration.get(key) == 1:
        migration.drop(key, "a reward model has one score")
    else:
        migration.miss(key, "no configuration classifies texts")


def _reshard(migration: Migration, key: str) -> None:
    value = "always" if migration.get(key) else "never"
    migration.take(key, "parallelism.fsdp_reshard_after_forward", value)


def _full_recompute(migration: Migration, key: str) -> None:
    if migration.get(key):
        migration.take(key, "activation_checkpoint.mode", "full")
    else:
        migration.drop(key, "gradient_checkpointing sets it")


def _early_stopping(migration: Migration, key: str) -> None:
    migration.change(
        key,
        "it counts validations",
        callbacks__earlystopping__metric="validation_loss",
        callbacks__earlystopping__patience=migration.get(key),
    )


def _wandb(migration: Migration, key: str) -> None:
    variable = {"wandb_name": "WANDB_NAME", "wandb_entity": "WANDB_ENTITY"}.get(
        key, "WANDB_PROJECT"
    )
    why = f"set {variable}={migration.get(key)} in the environment"
    migration.change(key, why, metrics__enable_wandb=True)


def _per_epoch(migration: Migration, key: str) -> None:
    option = "--validator.freq" if key.startswith("eval") else "--checkpoint.interval"
    migration.miss(key, f"set {option} in steps")


def _too_long(migration: Migration, key: str) -> None:
    value = migration.get(key)
    if value in ("drop", "raise"):
        migration.take(key, "dataloader.too_long", {"drop": "drop", "raise": "error"}[value])
    elif value == "truncate" and migration.module == "auto" and migration.config != "pretrain":
        migration.take(key, "dataloader.too_long", "truncate_right")
    else:
        migration.miss(key, "longer samples are not cut at the end; see --dataloader.too_long")


def _tokens(migration: Migration, key: str) -> None:
    added = hugging_face.add_tokens(migration, as_list(migration.get(key)))
    migration.take(key, "tokenizer.added_tokens", added)


_ATTENTION = unneeded("attention of a packed window is exact without an option")
_FASTER = unneeded("attention, norms and losses need no option here")

_SHARDING_KEYS = (
    *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "limit_all_gathers", "version"),
    *("state_dict_type", "final_state_dict_type", "sync_module_states", "use_orig_params"),
    *("cpu_ram_efficient_loading", "backward_prefetch", "forward_prefetch", "sharding_strategy"),
)

RULES: Mapping[str, Rule] = {
    **hugging_face.RULES,
    "sequence_len": to("training.seq_len", int),
    "lora_model_dir": to("model_converters.lora.adapter_path"),
    "lora_target_linear": unneeded("all linear layers in the blocks, the default"),
    "lora_fan_in_fan_out": unneeded("found by the layer"),
    "peft_use_dora": to("model_converters.lora.dora"),
    "peft_use_rslora": to("model_converters.lora.rslora"),
    **{
        f"fsdp_config.{prefix}{name}": unneeded(hugging_face.SHARDING)
        for prefix in ("", "fsdp_")
        for name in _SHARDING_KEYS
    },
    **dict.fromkeys(
        ("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"), _reshard
    ),
    **dict.fromkeys(
        ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"),
        _full_recompute,
    ),
    "fsdp_version": unneeded(hugging_face.SHARDING),
    "dp_shard_size": to("parallelism.data_parallel_shard_degree", int),
    "dp_replicate_size": to("parallelism.data_parallel_replicate_degree", int),
    "fsdp_config.fsdp_offload_params": to("training.enable_cpu_offload"),
    "fsdp_config.offload_params": to("training.enable_cpu_offload"),
    "rpo_alpha": missing("write the sum of both losses: loss.kind mix, loss.mix dpo=1 sft=WEIGHT"),
    "dpo_use_weighting": missing("pairs have equal weights"),
    "kto_desirable_weight": to("loss.desirable_weight", float),
    "kto_undesirable_weight": to("loss.undesirable_weight", float),
    "num_labels": _labels,
    "use_mlflow": to("metrics.enable_mlflow"),
    "mlflow_tracking_uri": missing("set MLFLOW_TRACKING_URI in the environment"),
    "mlflow_experiment_name": missing("set MLFLOW_EXPERIMENT_NAME in the environment"),
    "save_first_step": to("checkpoint.enable_first_step_checkpoint"),
    "auto_resume_from_checkpoints": unneeded("a run with the same --dump_folder resumes"),
    "eot_tokens": missing("turns end as the chat template has it; see --dataloader.chat_template"),
    "embedding_lr": missing("a group of parameters has a rate of its own: param_groups"),
    "lr_groups": missing("a group of parameters has a rate of its own: param_groups"),
    "wandb_project": _wandb,
    "wandb_entity": _wandb,
    "wandb_name": _wandb,
    "wandb_run_id": missing("a run that resumes continues its own"),
    "wandb_watch": missing("--metrics.enable_wandb sends what metrics.jsonl has"),
    "wandb_log_model": missing("checkpoints stay in --dump_folder"),
    "use_tensorboard": to("metrics.enable_tensorboard"),
    "evals_per_epoch": _per_epoch,
    "saves_per_epoch": _per_epoch,
    "dataset_prepared_path": unneeded("caches follow the content; see --dataloader.cache_dir"),
    "streaming": hugging_face.streaming,
    "streaming_multipack_buffer_size": to("dataloader.shuffle_buffer", int),
    "dataset_processes": unneeded("all cores tokenize"),
    "early_stopping_patience": _early_stopping,
    "torch_compile": to("compile.enable", lambda value: value is True),
    "pad_to_sequence_len": unneeded("windows always have the same length"),
    "eval_sample_packing": unneeded("validation packs as training does"),
    "eval_batch_size": unneeded("--training.local_batch_size holds for validation"),
    "group_by_length": missing("packing fills windows instead"),
    "model_type": unneeded("config.json names the family"),
    "tokenizer_type": unneeded("the folder's tokenizer"),
    "tokenizer_config": missing("put the tokenizer into the model's folder"),
    "is_llama_derived_model": unneeded("config.json names the family"),
    "is_mistral_derived_model": unneeded("config.json names the family"),
    "is_falcon_derived_model": unneeded("config.json names the family"),
    "flash_attention": _ATTENTION,
    "xformers_attention": _ATTENTION,
    "sdp_attention": _ATTENTION,
    "flex_attention": _ATTENTION,
    "attn_implementation": _ATTENTION,
    "flash_attn_cross_entropy": _FASTER,
    "flash_attn_rms_norm": _FASTER,
    "lora_mlp_kernel": _FASTER,
    "lora_qkv_kernel": _FASTER,
    "lora_o_kernel": _FASTER,
    "unsloth_cross_entropy_loss": _FASTER,
    "unsloth_lora_mlp": _FASTER,
    "unsloth_lora_o": _FASTER,
    "unsloth_lora_qkv": _FASTER,
    "unsloth_rms_norm": _FASTER,
    "unsloth_rope": _FASTER,
    "plugins": missing("kernels of plugins are not needed; other plugins have no counterpart"),
    "liger_rope": _FASTER,
    "liger_rms_norm": _FASTER,
    "liger_glu_activation": _FASTER,
    "liger_layer_norm": _FASTER,
    "liger_fused_linear_cross_entropy": _FASTER,
    "cut_cross_entropy": _FASTER,
    "chunked_cross_entropy": _FASTER,
    "skip_prepare_dataset": unneeded("rows are read as they are trained"),
    "strict": unneeded("unknown options are always refused"),
    "debug": unneeded("it is off"),
    "local_rank": unneeded("the launcher sets it"),
    "tf32": unneeded("--training.mixed_precision_param sets the type"),
    "save_safetensors": unneeded("models are written as safetensors"),
    "shuffle_merged_datasets": unneeded("datasets are always mixed and shuffled"),
    "loss_watchdog_threshold": missing("--spikes.threshold skips steps with a spike of the loss"),
    "loss_watchdog_patience": missing("--spikes.max_in_a_row"),
    "excess_length_strategy": _too_long,
    "special_tokens.pad_token": unneeded("padding is never trained"),
    "special_tokens.eos_token": missing("the tokenizer's folder names it"),
    "special_tokens.bos_token": unneeded("the tokenizer's folder names it"),
    "special_tokens.unk_token": unneeded("the tokenizer's folder names it"),
    "tokens": _tokens,
    "noisy_embedding_alpha": missing("no noise on embeddings"),
}

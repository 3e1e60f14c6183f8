"""Files of litgpt. Names and defaults are those that its documented files list."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.migration import hugging_face
from torchtitan.config.migration.outcome import Migration, Rule, missing, to, unneeded
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import DOWNLOADS

_FINE_TUNING: Mapping[str, object] = {
    "train.global_batch_size": 16,
    "train.micro_batch_size": 1,
    "train.lr_warmup_steps": 100,
    "seed": 1337,
}
_PRE_TRAINING: Mapping[str, object] = {
    "train.global_batch_size": 512,
    "train.micro_batch_size": 4,
    "train.lr_warmup_steps": 2000,
    "train.max_tokens": 3_000_000_000_000,
    "train.max_norm": 1.0,
    "train.min_lr": 4e-5,
    "seed": 42,
}
_TARGETS = {
    "lora_query": "q_proj",
    "lora_key": "k_proj",
    "lora_value": "v_proj",
    "lora_projection": "o_proj",
    "lora_mlp": "mlp",
    "lora_head": "lm_head",
}
_ON_BY_DEFAULT = ("lora_query", "lora_value")
_HUB_DATA = {
    "Alpaca": "yahma/alpaca-cleaned",
    "Alpaca2k": "mhenrichsen/alpaca_2k_test",
    "AlpacaGPT4": "vicgalle/alpaca-gpt4",
    "Deita": "HuggingFaceH4/deita-10k-v0-sft[train_sft]",
    "Dolly": "databricks/databricks-dolly-15k",
    "LIMA": "GAIR/lima",
    "LongForm": "akoksal/LongForm",
    "OpenWebText": "Skylion007/openwebtext",
    "TinyStories": "roneneldan/TinyStories",
}
_OWNERS = {
    "pythia": "EleutherAI",
    "Llama-3.1-Nemotron": "nvidia",
    "Llama": "meta-llama",
    "gemma": "google",
    "Gemma": "google",
    "phi": "microsoft",
    "Phi": "microsoft",
    "Qwen": "Qwen",
    "Mistral": "mistralai",
    "Mixtral": "mistralai",
    "SmolLM": "HuggingFaceTB",
    "OLMo": "allenai",
}
"""Start of the names of models → their owner on the hub; the first that fits counts."""

_PRETRAINING = ("TextFiles", "TinyLlama", "TinyStories", "OpenWebText", "LitData")


def defaults(given: Mapping[str, object], command: str) -> Mapping[str, Any]:
    """Return the values that a command uses for absent keys."""
    words = command.split()
    return _PRE_TRAINING if _pretrains(given, " ".join(words[1:2])) else _FINE_TUNING


def _kind_of_data(given: Mapping[str, object]) -> str:
    return str(given.get("data.class_path") or given.get("data") or "Alpaca").rpartition(".")[2]


def _pretrains(given: Mapping[str, object], command: str) -> bool:
    """Return whether a command, or the keys without a command, are of pre-training."""
    if command:
        return command == "pretrain"
    is_named = (
        given.get("model_name") is not None or given.get("initial_checkpoint_dir") is not None
    )
    return is_named or _kind_of_data(given) in _PRETRAINING


def migrate_litgpt(migration: Migration) -> None:
    """Read a file of litgpt, of `finetune_full`, `finetune_lora` or `pretrain`."""
    words = migration.command.split()
    command = words[1] if words[:1] == ["litgpt"] and len(words) > 1 else ""
    if "adapter" in command:
        raise UserError(f"litgpt {command}: only LoRA adapters are trained here")
    kind = _kind_of_data(migration.given)
    is_pretraining = _pretrains(migration.given, command)
    wants_adapters = command in ("finetune", "finetune_lora") or (
        not command and any(key.startswith("lora_") for key in migration.given)
    )
    _name_as_in_files(migration)
    quantized = migration.get("quantize")
    if is_pretraining:
        migration.config = "pretrain"
    elif wants_adapters:
        migration.config = "qlora" if quantized else "lora"
    if quantized:
        migration.change("quantize", "--config qlora, in nf4")
    _model(migration)
    _data(migration, kind)
    if migration.has_adapters:
        _targets(migration)
    _training(migration)
    _optimizer(migration, is_pretraining)
    _precision(migration)
    migration.apply(RULES)
    hugging_face.finish_adapters(migration)


def _name_as_in_files(migration: Migration) -> None:
    """Read the arguments of the data by their names in files; command lines may omit
    `init_args`."""
    for key in migration.keys():
        section, _, name = key.partition(".")
        if section == "data" and name and name.partition(".")[0] not in ("class_path", "init_args"):
            migration.rename(key, f"data.init_args.{name}")


def _model(migration: Migration) -> None:
    for key in ("checkpoint_dir", "initial_checkpoint_dir", "model_name"):
        path = migration.get(key)
        if path is None:
            continue
        path = str(path)
        if (Path(path) / "config.json").is_file():
            migration.take(key, "hf_assets_path", path)
            return
        parts = [part for part in Path(path).parts if part != "checkpoints"]
        name = "/".join(parts[-2:])
        if "/" not in name:
            owner = next((org for start, org in _OWNERS.items() if name.startswith(start)), "ORG")
            name = f"{owner}/{name}"
        folder = str(DOWNLOADS / parts[-1])
        migration.commands.append(f"torchtitan download {name}")
        if key == "model_name":
            migration.config = "scratch"
        migration.take(key, "hf_assets_path", folder, "a folder in Hugging Face's format")
        return


def _data(migration: Migration, kind: str) -> None:
    prefix = "data.init_args."
    path = next(
        (
            key
            for name in ("json_path", "train_data_path", "data_path")
            if migration.get(key := prefix + name) is not None
        ),
        "",
    )
    label = "data.class_path" if migration.get("data.class_path") is not None else "data"
    if path:
        migration.take(path, "dataloader.dataset", [str(migration.get(path))])
        if migration.get(label) is not None:
            migration.drop(label, "formats are found by the columns")
    elif kind in _HUB_DATA:
        why = "the same data by its name on the hub"
        migration.change(label, why, dataloader__dataset=[_HUB_DATA[kind]])
    else:
        migration.miss(label, "name the data: --dataloader.dataset FILE")
    if migration.config in ("pretrain", "scratch"):
        return
    migration.set(
        dataloader__packing="none",
        dataloader__too_long="truncate_right",
        dataloader__train_on="all",
        dataloader__chat_template="alpaca",
    )
    if migration.get(prefix + "mask_prompt") is not None:
        masked = "assistant" if migration.get(prefix + "mask_prompt") else "all"
        migration.take(prefix + "mask_prompt", "dataloader.train_on", masked)
    if (style := migration.get(prefix + "prompt_style")) is not None:
        if style in ("alpaca", "chatml", "llama3"):
            hugging_face.built_in_template(migration, prefix + "prompt_style", style)
        else:
            why = "the template in the model's folder"
            migration.take(prefix + "prompt_style", "dataloader.chat_template", "", why)


def _targets(migration: Migration) -> None:
    names: list[str] = []
    for key, name in _TARGETS.items():
        if migration.get(key, key in _ON_BY_DEFAULT):
            names += ["gate_proj", "up_proj", "down_proj"] if name == "mlp" else [name]
    migration.set(model_converters__lora__include=names)
    for key in _TARGETS:
        if migration.get(key) is not None:
            migration.take(
                key,
                "model_converters.lora.include",
                names,
                "all parts that are on are named together",
            )
    for key, (option, default) in {
        "lora_r": ("rank", 8),
        "lora_alpha": ("alpha", 16.0),
        "lora_dropout": ("dropout", 0.05),
    }.items():
        migration.set(**{f"model_converters__lora__{option}": default})
        if migration.get(key) is not None:
            migration.take(key, f"model_converters.lora.{option}")


def _training(migration: Migration) -> None:
    steps, tokens = migration.get("train.max_steps"), migration.get("train.max_tokens")
    epochs = migration.get("train.epochs")
    size = int(migration.get("train.global_batch_size"))
    seq_len = migration.get("train.max_seq_length")
    if seq_len is not None:
        migration.take("train.max_seq_length", "training.seq_len", int(seq_len))
    else:
        pretrains = migration.config in ("pretrain", "scratch")
        why = (
            "windows have the length of the model's context there"
            if pretrains
            else "samples have no limit there; longer ones are cut, and counted"
        )
        migration.change("train.max_seq_length", why, training__seq_len=2048)
    if steps is not None:
        migration.take("train.max_steps", "training.steps", int(steps))
    elif tokens is not None:
        n_steps = max(1, int(tokens) // (size * int(seq_len or 2048)))
        migration.change("train.max_tokens", "tokens by window and batch", training__steps=n_steps)
    else:
        migration.set(training__epochs=int(epochs or 5))
    if epochs is not None:
        if steps is None and tokens is None:
            migration.take("train.epochs", "training.epochs", int(epochs))
        else:
            migration.drop("train.epochs", "a number of steps takes precedence")
    norm = migration.get("train.max_norm")
    migration.set(training__max_norm=float(norm) if norm is not None else float("inf"))
    if norm is not None:
        migration.take("train.max_norm", "training.max_norm", float(norm))
    fraction = migration.get("train.lr_warmup_fraction")
    if fraction is not None:
        migration.take("train.lr_warmup_fraction", "lr_scheduler.warmup_ratio", float(fraction))
        migration.drop("train.lr_warmup_steps", "the fraction takes precedence")


def _optimizer(migration: Migration, is_pretraining: bool) -> None:
    migration.set(
        lr_scheduler__decay_type="cosine",
        lr_scheduler__min_lr_factor=0.0,
        lr_scheduler__warmup_from_zero=True,
        optimizer__name="AdamW",
    )
    prefix, rate = "train.", "learning_rate"
    if "optimizer.class_path" in migration.given:
        prefix, rate = "optimizer.init_args.", "lr"
    for theirs, ours in {rate: "lr", "weight_decay": "weight_decay"}.items():
        if (value := migration.get(prefix + theirs)) is not None:
            migration.take(prefix + theirs, f"optimizer.{ours}", float(value))
    migration.options.setdefault("optimizer.lr", 1e-3)
    migration.options.setdefault("optimizer.weight_decay", 0.01)
    if not migration.has_adapters:
        every = migration.options["optimizer.weight_decay"]
        migration.set(optimizer__param_groups__no_decay__weight_decay=every)
    betas = migration.get("optimizer.init_args.betas")
    betas = betas or [migration.get("train.beta1", 0.9), migration.get("train.beta2", 0.999)]
    migration.set(optimizer__beta1=float(betas[0]), optimizer__beta2=float(betas[1]))
    for key in ("optimizer.init_args.betas", "train.beta1", "train.beta2"):
        if migration.get(key) is not None:
            migration.change(key, "", optimizer__beta1=betas[0], optimizer__beta2=betas[1])
    for key in ("optimizer.class_path", "optimizer"):
        if migration.get(key) is not None:
            if str(migration.get(key)).rpartition(".")[2] == "AdamW":
                migration.take(key, "optimizer.name", "AdamW")
            else:
                migration.miss(key, "the file has AdamW instead")
    if (least := migration.get("train.min_lr")) is not None:
        if is_pretraining:
            factor = float(least) / migration.options["optimizer.lr"]
            why = "a fraction of the rate"
            migration.take("train.min_lr", "lr_scheduler.min_lr_factor", factor, why)
        else:
            migration.drop("train.min_lr", "fine-tuning there ends at rate 0")


def _precision(migration: Migration) -> None:
    name = migration.get("precision")
    if name is None:
        return
    if str(name).startswith("32"):
        migration.take("precision", "training.mixed_precision_param", "float32")
    elif name == "bf16-true":
        migration.set(training__mixed_precision_param="bfloat16")
        if migration.has_adapters:
            migration.take("precision", "training.mixed_precision_param", "bfloat16")
        else:
            migration.change(
                "precision",
                "",
                training__dtype="bfloat16",
                training__mixed_precision_param="bfloat16",
            )
    else:
        dtype = "float16" if str(name).startswith("16") else "bfloat16"
        why = "the weights are in float32" if name == "16-true" else ""
        migration.take("precision", "training.mixed_precision_param", dtype, why)


def _logger(migration: Migration, key: str) -> None:
    if migration.get(key) == "csv":
        migration.drop(key, "metrics.jsonl is always written")
    else:
        hugging_face.report_to(migration, key)


_GENERATED = missing("name texts to continue during training: --callbacks.samples.prompts TEXT")

RULES: Mapping[str, Rule] = {
    "out_dir": to("dump_folder"),
    "seed": to("debug.seed"),
    "train.global_batch_size": to("training.global_batch_size", int),
    "train.micro_batch_size": to("training.local_batch_size", int),
    "train.save_interval": to("checkpoint.interval", int),
    "train.log_interval": to("metrics.log_freq", int),
    "train.lr_warmup_steps": to("lr_scheduler.warmup_steps", int),
    "train.tie_embeddings": missing("config.json states it"),
    "train.max_time": missing("stop the run with Ctrl-C, which saves it"),
    "train.max_iters": missing("--training.steps"),
    "eval.interval": to("validator.freq", int),
    "eval.max_iters": to("validator.steps", int),
    "eval.initial_validation": to("validator.at_start"),
    "eval.final_validation": unneeded("always"),
    "eval.max_new_tokens": _GENERATED,
    "eval.evaluate_example": _GENERATED,
    "eval.num_generation_examples": _GENERATED,
    "logger_name": _logger,
    "devices": unneeded("the number of processes: NGPU"),
    "num_nodes": unneeded("the number of hosts: NNODES"),
    "resume": unneeded("a run with the same --dump_folder resumes"),
    "tokenizer_dir": unneeded("the folder of the model has the tokenizer"),
    "access_token": unneeded("set HF_TOKEN for the download"),
    "ignore_index": unneeded("untrained labels are ignored"),
    "data.init_args.ignore_index": unneeded("untrained labels are ignored"),
    "data.init_args.num_workers": unneeded("data is tokenized before training"),
    "data.init_args.seed": unneeded("--debug.seed"),
    "data.init_args.download_dir": unneeded("data by name is kept in a cache"),
    "data.init_args.val_split_fraction": missing(
        "all rows are trained on; write held-out rows to a file for --validator.dataset"
    ),
}

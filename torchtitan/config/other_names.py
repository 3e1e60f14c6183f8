"""Options of other libraries, and what sets the same here.

Names are those of transformers' `TrainingArguments` and PEFT's `LoraConfig`, TRL, axolotl,
LLaMA-Factory, torchtune, torchtitan before its configuration in Python, and litgpt, from their
documentation.
"""

from collections.abc import Mapping

_GLOBAL_BATCH = (
    "--training.global_batch_size: windows per step on all ranks, from which accumulation follows"
)
_RESUMING = (
    "nothing: a run with --checkpoint.enable and the same --dump_folder resumes; "
    "--checkpoint.load_step N for an earlier step"
)
_LORA_CONFIG = "of a configuration such as --config lora"
_QLORA = "--config qlora"
_IN_BFLOAT16 = "--training.mixed_precision_param bfloat16, the default under FSDP"
_RECOMPUTE = "--activation_checkpoint.mode full"
_SEQ_LEN = "--training.seq_len"
_LOCAL_BATCH = "--training.local_batch_size"
_RATE = "--optimizer.lr"
_EPOCHS = "--training.epochs"
_STEPS = "--training.steps"
_DATASET = "--dataloader.dataset"
_FOLDER = "--dump_folder"
_MODEL = "--hf_assets_path DIR, a folder with the model; --module auto finds its family"
_MODULE = "--module and --config; `torchtitan ls` lists them"
_INTERVAL = "--checkpoint.interval, after --checkpoint.enable"
_WARMUP = "--lr_scheduler.warmup_steps"
_COMPILE = "--compile.enable"
_NORM = "--training.max_norm"

OTHER_NAMES: Mapping[str, str] = {
    # transformers, TRL and PEFT
    "adam_beta1": "--optimizer.beta1",
    "adam_beta2": "--optimizer.beta2",
    "adam_epsilon": "--optimizer.eps",
    "bf16": _IN_BFLOAT16,
    "dataset_name": _DATASET,
    "dataset_text_field": "--dataloader.text_column",
    "ddp_timeout": "--comm.train_timeout_seconds",
    "eval_steps": "--validator.freq, after --validator.enable",
    "fp16": "--training.mixed_precision_param float16",
    "gradient_accumulation_steps": _GLOBAL_BATCH,
    "gradient_checkpointing": _RECOMPUTE,
    "learning_rate": _RATE,
    "load_in_4bit": _QLORA,
    "load_in_8bit": "--config qlora, in few bits: as published, otherwise NF4",
    "logging_steps": "--metrics.log_freq",
    "lora_alpha": f"--model_converters.lora.alpha {_LORA_CONFIG}",
    "lora_dropout": f"--model_converters.lora.dropout {_LORA_CONFIG}",
    "lora_r": f"--model_converters.lora.rank {_LORA_CONFIG}",
    "lora_rank": f"--model_converters.lora.rank {_LORA_CONFIG}",
    "lora_target_modules": f"--model_converters.lora.include {_LORA_CONFIG}",
    "lr": _RATE,
    "lr_scheduler_type": "--lr_scheduler.decay_type",
    "max_completion_length": "--rollout.max_new_tokens of --module rl",
    "max_grad_norm": _NORM,
    "max_length": _SEQ_LEN,
    "max_seq_length": _SEQ_LEN,
    "max_steps": _STEPS,
    "model_name_or_path": _MODEL,
    "num_generations": "--rollout.group_size of --module rl",
    "num_train_epochs": _EPOCHS,
    "optim": "--optimizer.name",
    "output_dir": _FOLDER,
    "overwrite_output_dir": "another --dump_folder: a run is never overwritten",
    "per_device_eval_batch_size": f"{_LOCAL_BATCH}, also for validation",
    "per_device_train_batch_size": _LOCAL_BATCH,
    "report_to": "--metrics.enable_wandb, or enable_mlflow, enable_trackio, enable_tensorboard",
    "resume_from_checkpoint": _RESUMING,
    "reward_funcs": "--rewards of --module rl",
    "save_steps": _INTERVAL,
    "save_total_limit": "--checkpoint.keep_latest_k",
    "torch_compile": _COMPILE,
    "train_file": _DATASET,
    "use_liger_kernel": "nothing: no loss here holds all logits",
    "use_peft": "--config lora",
    "warmup_ratio": "--lr_scheduler.warmup_ratio",
    # axolotl and LLaMA-Factory
    "adapter": "--config lora or qlora",
    "base_model": _MODEL,
    "cutoff_len": _SEQ_LEN,
    "datasets": _DATASET,
    "finetuning_type": "--config sft, lora or qlora",
    "micro_batch_size": _LOCAL_BATCH,
    "num_epochs": _EPOCHS,
    "sample_packing": "--dataloader.packing",
    "sequence_len": _SEQ_LEN,
    "template": "--dataloader.chat_template, by default the one in the model's folder",
    "train_on_inputs": "--dataloader.train_on all",
    "val_set_size": "--validator.dataset: a dataset of its own",
    # torchtune
    "batch_size": _LOCAL_BATCH,
    "checkpointer.checkpoint_dir": _MODEL,
    "enable_activation_checkpointing": _RECOMPUTE,
    "lora_attn_modules": f"--model_converters.lora.include {_LORA_CONFIG}",
    "max_steps_per_epoch": _STEPS,
    "tokenizer.max_seq_len": _SEQ_LEN,
    "tokenizer.path": _MODEL,
    # torchtitan's files in TOML
    "activation_checkpoint.selective_ac_option": "--activation_checkpoint.selective_option",
    "checkpoint.enable_checkpoint": "--checkpoint.enable",
    "checkpoint.interval_type": _INTERVAL,
    "job.config_file": "--config_file run.yaml, beside --module and --config",
    "job.dump_folder": _FOLDER,
    "model.flavor": _MODULE,
    "model.name": _MODULE,
    "model.tokenizer_path": _MODEL,
    "training.batch_size": _LOCAL_BATCH,
    "training.compile": _COMPILE,
    "training.dataset": _DATASET,
    "training.dataset_path": _DATASET,
    "training.seed": "--debug.seed",
    # litgpt
    "checkpoint_dir": _MODEL,
    "out_dir": _FOLDER,
    "precision": _IN_BFLOAT16,
    "train.global_batch_size": _GLOBAL_BATCH,
    "train.lr_warmup_steps": _WARMUP,
    "train.max_norm": _NORM,
    "train.max_steps": _STEPS,
    "train.micro_batch_size": _LOCAL_BATCH,
    "train.save_interval": _INTERVAL,
}
"""Name of an option elsewhere, without dashes before it → what to use here."""

"""Options of other libraries, and what sets the same here.

Names are those of transformers' `TrainingArguments` and PEFT's `LoraConfig`, TRL, axolotl,
LLaMA-Factory, ms-swift, Unsloth, torchtune, torchtitan before its configuration in Python, and
litgpt, from their documentation.
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
_SEED = "--debug.seed"
_ENCODING = "--dataloader.encoding_processes, one for each core by default"
_HELD_OUT = "--validator.dataset: a dataset of its own"
_VALIDATION = "--validator.freq, after --validator.enable"
_RANK = f"--model_converters.lora.rank {_LORA_CONFIG}"
_TARGETS = f"--model_converters.lora.include {_LORA_CONFIG}"
_ATTENTION = "nothing: the fastest kernel for the device and the masks is chosen"
_ACCUMULATED = "nothing: losses are means over the tokens of all micro-batches"
_SHARDING = "--parallelism.data_parallel_shard_degree, by default all processes (FSDP2)"
_PUSH = "nothing: `torchtitan push FOLDER org/name` uploads the result"
_PROCESSES = "NGPU=N ./run_train.sh, torchrun or Slurm (docs/multinode.md)"
_METHOD = "--module preference, rl, ppo or reward; `torchtitan ls` lists their configurations"
_TRAIN_ON = "--dataloader.train_on; assistant, the default, trains answers only"
_PATIENCE = "--callbacks.earlystopping.patience"
_LOGGERS = "--metrics.enable_wandb, enable_mlflow, enable_trackio or enable_tensorboard"

OTHER_NAMES: Mapping[str, str] = {
    # transformers, TRL and PEFT
    "adam_beta1": "--optimizer.beta1",
    "adam_beta2": "--optimizer.beta2",
    "adam_epsilon": "--optimizer.eps",
    "assistant_only_loss": _TRAIN_ON,
    "attn_implementation": _ATTENTION,
    "auto_find_batch_size": "nothing: torchtitan plan finds the largest local batch",
    "average_tokens_across_devices": _ACCUMULATED,
    "bf16": _IN_BFLOAT16,
    "completion_only_loss": _TRAIN_ON,
    "data_seed": _SEED,
    "dataloader_num_workers": "--dataloader.num_workers, for streams; other data is prepared once",
    "dataset_config": "--dataloader.dataset org/name:config[split]",
    "dataset_name": _DATASET,
    "dataset_num_proc": _ENCODING,
    "dataset_text_field": "--dataloader.text_column",
    "dataset_train_split": "--dataloader.dataset org/name:config[split]",
    "ddp_timeout": "--comm.train_timeout_seconds",
    "deepspeed": _SHARDING,
    "early_stopping_patience": _PATIENCE,
    "epsilon": "--policy.clip_low of --module rl",
    "epsilon_high": "--policy.clip_high of --module rl",
    "eval_steps": _VALIDATION,
    "eval_strategy": _VALIDATION,
    "evaluation_strategy": _VALIDATION,
    "fp16": "--training.mixed_precision_param float16",
    "fsdp": _SHARDING,
    "gradient_accumulation_steps": _GLOBAL_BATCH,
    "gradient_checkpointing": _RECOMPUTE,
    "greater_is_better": "--checkpoint.best_goal",
    "group_by_length": "--dataloader.packing, which fills windows",
    "hub_model_id": _PUSH,
    "learning_rate": _RATE,
    "load_best_model_at_end": "--checkpoint.keep_best",
    "load_in_4bit": _QLORA,
    "load_in_8bit": "--config qlora, in few bits: as published, otherwise NF4",
    "logging_dir": "--dump_folder; TensorBoard: --metrics.save_tb_folder",
    "logging_steps": "--metrics.log_freq",
    "lora_alpha": f"--model_converters.lora.alpha {_LORA_CONFIG}",
    "lora_dropout": f"--model_converters.lora.dropout {_LORA_CONFIG}",
    "lora_r": _RANK,
    "lora_rank": _RANK,
    "lora_target_modules": _TARGETS,
    "loss_type": "--loss.kind of --module preference, --policy.method of --module rl",
    "lr": _RATE,
    "lr_scheduler_kwargs": "--lr_scheduler.min_lr_factor, decay_ratio or decay_power",
    "lr_scheduler_type": "--lr_scheduler.decay_type",
    "max_completion_length": "--rollout.max_new_tokens of --module rl",
    "max_grad_norm": _NORM,
    "max_length": _SEQ_LEN,
    "max_prompt_length": "--dataloader.too_long, since a window also holds the answer",
    "max_seq_length": _SEQ_LEN,
    "max_steps": _STEPS,
    "metric_for_best_model": "--checkpoint.best_metric",
    "model_name_or_path": _MODEL,
    "num_generations": "--rollout.group_size of --module rl",
    "num_iterations": "--policy.updates of --module rl",
    "num_train_epochs": _EPOCHS,
    "optim": "--optimizer.name",
    "output_dir": _FOLDER,
    "overwrite_output_dir": "another --dump_folder: a run is never overwritten",
    "per_device_eval_batch_size": f"{_LOCAL_BATCH}, also for validation",
    "per_device_train_batch_size": _LOCAL_BATCH,
    "push_to_hub": _PUSH,
    "report_to": "--metrics.enable_wandb, or enable_mlflow, enable_trackio, enable_tensorboard",
    "resume_from_checkpoint": _RESUMING,
    "reward_funcs": "--rewards of --module rl",
    "save_steps": _INTERVAL,
    "save_strategy": _INTERVAL,
    "save_total_limit": "--checkpoint.keep_latest_k",
    "target_modules": _TARGETS,
    "torch_compile": _COMPILE,
    "torch_dtype": _IN_BFLOAT16,
    "train_file": _DATASET,
    "use_dora": f"--model_converters.lora.dora {_LORA_CONFIG}",
    "use_liger_kernel": "nothing: no loss here holds all logits",
    "use_peft": "--config lora",
    "use_rslora": f"--model_converters.lora.rslora {_LORA_CONFIG}",
    "use_vllm": "--rollout.engine vllm of --module rl",
    "vllm_server_base_url": "--rollout.url of --module rl",
    "warmup_ratio": "--lr_scheduler.warmup_ratio",
    # axolotl and LLaMA-Factory
    "adapter": "--config lora or qlora",
    "base_model": _MODEL,
    "cutoff_len": _SEQ_LEN,
    "dataset_dir": _DATASET,
    "dataset_prepared_path": "--dataloader.cache_dir",
    "datasets": _DATASET,
    "do_train": "nothing: `torchtitan train` trains, and --validator.enable validates",
    "dpo_beta": "--loss.beta of --module preference",
    "evals_per_epoch": _VALIDATION,
    "finetuning_type": "--config sft, lora or qlora",
    "flash_attention": _ATTENTION,
    "flash_attn": _ATTENTION,
    "lora_model_dir": f"--model_converters.lora.adapter_path {_LORA_CONFIG}",
    "lora_target": _TARGETS,
    "lora_target_linear": _TARGETS,
    "lr_scheduler": "--lr_scheduler.decay_type",
    "max_samples": "--training.steps; data is read as a whole",
    "micro_batch_size": _LOCAL_BATCH,
    "num_epochs": _EPOCHS,
    "optimizer": "--optimizer.name",
    "overwrite_cache": "nothing: caches follow the content of the data",
    "pad_to_sequence_len": "nothing: windows have --training.seq_len tokens",
    "plot_loss": "nothing: `torchtitan report FOLDER` draws the curves",
    "pref_beta": "--loss.beta of --module preference",
    "pref_loss": "--loss.kind of --module preference",
    "preprocessing_num_workers": _ENCODING,
    "quantization_bit": _QLORA,
    "rl": _METHOD,
    "sample_packing": "--dataloader.packing",
    "saves_per_epoch": _INTERVAL,
    "sequence_len": _SEQ_LEN,
    "special_tokens": "--tokenizer.added_tokens",
    "stage": _METHOD,
    "template": "--dataloader.chat_template, by default the one in the model's folder",
    "train_on_inputs": "--dataloader.train_on all",
    "val_set_size": _HELD_OUT,
    "wandb_project": "--metrics.enable_wandb, with the variable WANDB_PROJECT",
    "xformers_attention": _ATTENTION,
    # ms-swift and Unsloth
    "attn_impl": _ATTENTION,
    "dataset": _DATASET,
    "freeze_vit": "--model.train of --config sft_images: the parts to train",
    "max_new_tokens": "--rollout.max_new_tokens, --callbacks.answers.max_new_tokens",
    "merge_lora": "nothing: the last checkpoint has merged weights, and the adapter beside them",
    "model": _MODEL,
    "model_name": _MODEL,
    "model_type": _MODULE,
    "r": _RANK,
    "random_state": _SEED,
    "rlhf_type": _METHOD,
    "save_gguf": "nothing: torchtitan convert writes the file",
    "split_dataset_ratio": _HELD_OUT,
    "streaming": "--dataloader.stream all",
    "train_type": "--config sft, lora or qlora",
    "tuner_type": "--config sft, lora or qlora",
    "use_gradient_checkpointing": _RECOMPUTE,
    "val_dataset": _HELD_OUT,
    # torchtune
    "batch_size": _LOCAL_BATCH,
    "checkpointer.checkpoint_dir": _MODEL,
    "enable_activation_checkpointing": _RECOMPUTE,
    "lora_attn_modules": _TARGETS,
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
    "training.seed": _SEED,
    # litgpt
    "checkpoint_dir": _MODEL,
    "data": _DATASET,
    "devices": _PROCESSES,
    "eval.initial_validation": "--validator.at_start",
    "eval.interval": _VALIDATION,
    "eval.max_iters": "--validator.steps",
    "initial_checkpoint_dir": _MODEL,
    "logger_name": _LOGGERS,
    "num_nodes": _PROCESSES,
    "out_dir": _FOLDER,
    "precision": _IN_BFLOAT16,
    "quantize": _QLORA,
    "resume": _RESUMING,
    "tokenizer_dir": _MODEL,
    "train.epochs": _EPOCHS,
    "train.global_batch_size": _GLOBAL_BATCH,
    "train.log_interval": "--metrics.log_freq",
    "train.lr_warmup_steps": _WARMUP,
    "train.max_norm": _NORM,
    "train.max_seq_length": _SEQ_LEN,
    "train.max_steps": _STEPS,
    "train.micro_batch_size": _LOCAL_BATCH,
    "train.save_interval": _INTERVAL,
}
"""Name of an option elsewhere, without dashes before it → what to use here."""

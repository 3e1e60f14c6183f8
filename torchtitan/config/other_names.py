"""Options of other libraries, and their replacements here.

The names are from the documentation of transformers' `TrainingArguments`, PEFT's `LoraConfig`, TRL,
axolotl, LLaMA-Factory, ms-swift, Unsloth, torchtune, litgpt, and torchtitan before its
configuration in Python.
"""

from collections.abc import Mapping

_GLOBAL_BATCH = (
    "--training.global_batch_size: windows per step on all ranks, which sets the accumulation"
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
_BETA = "--loss.beta of --module preference, --policy.beta of --module rl"
_SAMPLING = "--rollout.{0} of --module rl"
_ANSWERS = "--callbacks.answers, which scores generated answers during training"
_DEVICE = "nothing: GPUs are used if there are any; CUDA_VISIBLE_DEVICES= hides them"
_REFERENCE = "--reference.kind, and --reference.path for another model"
_REMOVED = "nothing: it has no counterpart here; leave it out"
_MADE = "nothing: only the columns of the format are read"
_SMOOTHING = "--loss.label_smoothing, with --loss.kind cdpo of --module preference"
_FREEZE = (
    "`Freeze` in a configuration function (docs/freezing.md), which selects parameters by name"
)
_ADAPTED = f"{_TARGETS}, for adapters of these layers; the others stay frozen"
_SEPARATE_RATE = "--optimizer.param_groups, groups of parameters with their own rates"
_COMPARED = "--compile.components and --compile.backend, after --compile.enable"
_EXPORTED = (
    "--checkpoint.last_save_model_only, for the last one; earlier ones hold all that resuming needs"
)
_CONVERTERS = "`model_converters` of a configuration function (docs/extending.md)"
_PARTS = "--model.train, the parts to train, of --config sft_images"
_CACHE = "--dataloader.cache_dir, on the command line"
_COUNTED = "nothing: every log line has tokens per second, and metrics.jsonl the tokens seen"
_WEIGHTS = "--dataloader.weights, a share of each dataset"

OTHER_NAMES: Mapping[str, str] = {
    # transformers, TRL and PEFT
    "activation_offloading": _RECOMPUTE,
    "adam_beta1": "--optimizer.beta1",
    "adam_beta2": "--optimizer.beta2",
    "adam_epsilon": "--optimizer.eps",
    "assistant_only_loss": _TRAIN_ON,
    "attn_implementation": _ATTENTION,
    "auto_find_batch_size": "nothing: torchtitan plan finds the largest local batch",
    "average_tokens_across_devices": _ACCUMULATED,
    "batch_eval_metrics": _ANSWERS,
    "beta": _BETA,
    "bf16": _IN_BFLOAT16,
    "chat_template": "--dataloader.chat_template, by default the one in the model's folder",
    "chat_template_path": "--dataloader.chat_template, by default the one in the model's folder",
    "completion_only_loss": _TRAIN_ON,
    "data_seed": _SEED,
    "dataloader_drop_last": "nothing: no row is dropped",
    "dataloader_num_workers": "--dataloader.num_workers, for streams; other data is prepared once",
    "dataloader_persistent_workers": "nothing: workers live as long as the run",
    "dataloader_pin_memory": "nothing: memory is pinned on CUDA",
    "dataloader_prefetch_factor": "--dataloader.num_workers; each prepares two batches ahead",
    "dataset_config": "--dataloader.dataset org/name:config[split]",
    "dataset_name": _DATASET,
    "dataset_num_proc": _ENCODING,
    "dataset_text_field": "--dataloader.text_column",
    "dataset_train_split": "--dataloader.dataset org/name:config[split]",
    "ddp_find_unused_parameters": "nothing: unused parameters need no option",
    "ddp_timeout": "--comm.train_timeout_seconds",
    "deepspeed": _SHARDING,
    "desirable_weight": "--loss.desirable_weight of --module preference",
    "do_eval": _VALIDATION,
    "early_stopping_patience": _PATIENCE,
    "eos_token": "nothing: the tokenizer and the chat template have it",
    "epsilon": "--policy.clip_low of --module rl",
    "epsilon_high": "--policy.clip_high of --module rl",
    "eval_accumulation_steps": "nothing: validation adds up losses and keeps no logits",
    "eval_delay": _VALIDATION,
    "eval_do_sample": _ANSWERS,
    "eval_on_start": "--validator.at_start",
    "eval_packing": "--dataloader.packing, also for validation",
    "eval_steps": _VALIDATION,
    "eval_strategy": _VALIDATION,
    "evaluation_strategy": _VALIDATION,
    "fp16": "--training.mixed_precision_param float16",
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "galore_rank": "--optimizer.name; GaLore is not among them",
    "gradient_accumulation_steps": _GLOBAL_BATCH,
    "gradient_checkpointing": _RECOMPUTE,
    "greater_is_better": "--checkpoint.best_goal",
    "group_by_length": "--dataloader.packing, which fills windows",
    "hub_model_id": _PUSH,
    "ignore_data_skip": _RESUMING,
    "include_num_input_tokens_seen": _COUNTED,
    "include_tokens_per_second": _COUNTED,
    "jit_mode_eval": _REMOVED,
    "label_smoothing": _SMOOTHING,
    "label_smoothing_factor": "nothing: the loss of tokens has no smoothing",
    "learning_rate": _RATE,
    "load_best_model_at_end": "--checkpoint.keep_best",
    "load_in_4bit": _QLORA,
    "load_in_8bit": "--config qlora, in few bits: as published, otherwise NF4",
    "local_rank": _PROCESSES,
    "log_completions": "--callbacks.samples, which shows texts during training",
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
    "mask_truncated_completions": "--rollout.overlong mask of --module rl",
    "max_completion_length": "--rollout.max_new_tokens of --module rl",
    "max_grad_norm": _NORM,
    "max_length": _SEQ_LEN,
    "max_prompt_length": "--dataloader.too_long, since a window also holds the answer",
    "max_seq_length": _SEQ_LEN,
    "max_steps": _STEPS,
    "metric_for_best_model": "--checkpoint.best_metric",
    "min_p": _SAMPLING.format("min_p"),
    "model_init_kwargs": _MODEL,
    "model_name_or_path": _MODEL,
    "neftune_noise_alpha": _REMOVED,
    "no_cuda": _DEVICE,
    "num_completions_to_print": "--callbacks.samples, which shows texts during training",
    "num_generations": "--rollout.group_size of --module rl",
    "num_iterations": "--policy.updates of --module rl",
    "num_train_epochs": _EPOCHS,
    "num_warmup_steps": _WARMUP,
    "optim": "--optimizer.name",
    "optim_args": "--optimizer.beta1, beta2 or eps",
    "optim_target_modules": _SEPARATE_RATE,
    "output_dir": _FOLDER,
    "overwrite_output_dir": "another --dump_folder: a run is never overwritten",
    "packing": "--dataloader.packing, for rows; text is always packed",
    "pad_to_multiple_of": "nothing: windows have --training.seq_len tokens",
    "pad_token": "nothing: padding is not attended to, and needs no token of its own",
    "padding_free": "nothing: packed samples do not see each other",
    "per_device_eval_batch_size": f"{_LOCAL_BATCH}, also for validation",
    "per_device_train_batch_size": _LOCAL_BATCH,
    "precompute_ref_log_probs": "--reference.kind cached of --module preference",
    "predict_with_generate": _ANSWERS,
    "push_to_hub": _PUSH,
    "ref_model": _REFERENCE,
    "ref_model_mixup_alpha": "--reference.update_share, in preference optimization and RL",
    "ref_model_sync_steps": "--reference.update_every, in preference optimization and RL",
    "reference_free": "--loss.kind of --module preference: simpo and orpo need no reference",
    "remove_unused_columns": _MADE,
    "repetition_penalty": "nothing: answers are drawn by the model's own probabilities",
    "report_to": "--metrics.enable_wandb, or enable_mlflow, enable_trackio, enable_tensorboard",
    "resume_from_checkpoint": _RESUMING,
    "reward_funcs": "--rewards of --module rl",
    "reward_model_path": "--rewards reward_model=DIR of --module rl",
    "rpo_alpha": "--loss.kind mix and --loss.mix dpo=1 sft=ALPHA of --module preference",
    "run_name": "--dump_folder; of Weights & Biases: the variable WANDB_NAME",
    "save_only_model": _EXPORTED,
    "save_safetensors": "nothing: exports are safetensors",
    "save_steps": _INTERVAL,
    "save_strategy": _INTERVAL,
    "save_total_limit": "--checkpoint.keep_latest_k",
    "scale_rewards": "--policy.advantage normalized, centered or batch_scaled",
    "skip_memory_metrics": "nothing: every log line has the memory",
    "sync_ref_model": "--reference.update_every, in steps",
    "target_modules": _TARGETS,
    "temperature": "--rollout.temperature, or --callbacks.samples.temperature",
    "tf32": _REMOVED,
    "top_k": _SAMPLING.format("top_k"),
    "top_p": _SAMPLING.format("top_p"),
    "torch_compile": _COMPILE,
    "torch_compile_backend": "--compile.backend, after --compile.enable",
    "torch_compile_mode": _COMPARED,
    "torch_dtype": _IN_BFLOAT16,
    "torch_empty_cache_steps": _REMOVED,
    "train_file": _DATASET,
    "truncation_mode": "--dataloader.too_long truncate_left or truncate_right",
    "trust_remote_code": "TORCHTITAN_TRUST_REMOTE_CODE=1, a variable, for code in a model's folder",
    "undesirable_weight": "--loss.undesirable_weight of --module preference",
    "use_cpu": _DEVICE,
    "use_dora": f"--model_converters.lora.dora {_LORA_CONFIG}",
    "use_liger_kernel": "nothing: no loss here holds all logits",
    "use_peft": "--config lora",
    "use_rslora": f"--model_converters.lora.rslora {_LORA_CONFIG}",
    "use_vllm": "--rollout.engine vllm of --module rl",
    "vllm_mode": "--rollout.engine vllm of --module rl",
    "vllm_server_base_url": "--rollout.url of --module rl",
    "warmup_ratio": "--lr_scheduler.warmup_ratio",
    # axolotl and LLaMA-Factory
    "adapter": "--config lora or qlora",
    "additional_target": _ADAPTED,
    "base_model": _MODEL,
    "buffer_size": "--dataloader.shuffle_buffer, after --dataloader.stream all",
    "context_parallel_size": "--parallelism.context_parallel_degree",
    "cosine_min_lr_ratio": "--lr_scheduler.min_lr_factor",
    "curriculum_sampling": "--dataloader.sampler.shuffle, off for the order of the data",
    "cutoff_len": _SEQ_LEN,
    "dataset_dir": _DATASET,
    "dataset_prepared_path": _CACHE,
    "datasets": _DATASET,
    "do_train": "nothing: `torchtitan train` trains, and --validator.enable validates",
    "dpo_beta": "--loss.beta of --module preference",
    "eager_attention": _ATTENTION,
    "early_stopping_steps": "--callbacks.earlystopping.patience, in validations",
    "eval_dataset": _HELD_OUT,
    "eval_max_new_tokens": _ANSWERS,
    "eval_table_size": "--callbacks.samples, which shows texts during training",
    "evals_per_epoch": _VALIDATION,
    "finetuning_type": "--config sft, lora or qlora",
    "flash_attention": _ATTENTION,
    "flash_attn": _ATTENTION,
    "freeze_trainable_layers": _FREEZE,
    "freeze_trainable_modules": _FREEZE,
    "freeze_vision_tower": _PARTS,
    "gc_steps": "--training.gc_freq",
    "image_max_pixels": _REMOVED,
    "infer_backend": "--rollout.engine of --module rl",
    "interleave_probs": _WEIGHTS,
    "lora_model_dir": f"--model_converters.lora.adapter_path {_LORA_CONFIG}",
    "lora_modules_to_save": _ADAPTED,
    "lora_target": _TARGETS,
    "lora_target_linear": _TARGETS,
    "loraplus_lr_embedding": _SEPARATE_RATE,
    "loraplus_lr_ratio": _SEPARATE_RATE,
    "lr_scheduler": "--lr_scheduler.decay_type",
    "mask_history": "--dataloader.train_on last_assistant",
    "max_samples": "--training.steps; data is read as a whole",
    "micro_batch_size": _LOCAL_BATCH,
    "mix_strategy": _WEIGHTS,
    "neat_packing": "--dataloader.packing, whose samples do not see each other",
    "num_epochs": _EPOCHS,
    "optimizer": "--optimizer.name",
    "overwrite_cache": "nothing: caches follow the content of the data",
    "pad_to_sequence_len": "nothing: windows have --training.seq_len tokens",
    "peft_use_dora": "--model_converters.lora.dora of a configuration such as --config lora",
    "peft_use_rslora": "--model_converters.lora.rslora of a configuration such as --config lora",
    "plot_loss": "nothing: `torchtitan report FOLDER` draws the curves",
    "pref_beta": "--loss.beta of --module preference",
    "pref_loss": "--loss.kind of --module preference",
    "preprocessing_num_workers": _ENCODING,
    "quantization_bit": _QLORA,
    "rl": _METHOD,
    "rl_beta": _BETA,
    "sample_packing": "--dataloader.packing",
    "saves_per_epoch": _INTERVAL,
    "sequence_len": _SEQ_LEN,
    "sequence_parallel_degree": "--parallelism.context_parallel_degree",
    "shuffle_merged_datasets": "--dataloader.sampler.shuffle, the default",
    "special_tokens": "--tokenizer.added_tokens",
    "stage": _METHOD,
    "template": "--dataloader.chat_template, by default the one in the model's folder",
    "test_datasets": _HELD_OUT,
    "tokenized_path": _CACHE,
    "tokens": "--tokenizer.added_tokens, as a list",
    "train_on_inputs": "--dataloader.train_on all",
    "unfrozen_parameters": _FREEZE,
    "upcast_layernorm": "nothing: norms compute in float32",
    "use_unsloth": _REMOVED,
    "val_set_size": _HELD_OUT,
    "wandb_project": "--metrics.enable_wandb, with the variable WANDB_PROJECT",
    "xformers_attention": _ATTENTION,
    # ms-swift and Unsloth
    "attn_impl": _ATTENTION,
    "dataset": _DATASET,
    "freeze_vit": _PARTS,
    "max_new_tokens": "--rollout.max_new_tokens, --callbacks.answers.max_new_tokens",
    "merge_lora": "nothing: the last checkpoint has merged weights, and the adapter next to them",
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
    "checkpointer.output_dir": _FOLDER,
    "enable_activation_checkpointing": _RECOMPUTE,
    "enable_activation_offloading": _RECOMPUTE,
    "lora_attn_modules": _TARGETS,
    "max_steps_per_epoch": _STEPS,
    "optimizer_in_bwd": "--optimizer.early_step_in_backward",
    "profiler.enabled": "--profiling.enable_profiling",
    "tokenizer.max_seq_len": _SEQ_LEN,
    "tokenizer.path": _MODEL,
    # torchtitan's files in TOML
    "activation_checkpoint.selective_ac_option": "--activation_checkpoint.selective_option",
    "checkpoint.enable_checkpoint": "--checkpoint.enable",
    "checkpoint.interval_type": _INTERVAL,
    "float8.enable_float8_linear": _CONVERTERS,
    "job.config_file": "--config_file run.yaml, with --module and --config",
    "job.description": "nothing: --dump_folder names the run",
    "job.dump_folder": _FOLDER,
    "memory_estimation.enabled": "COMM_MODE=fake_backend, a dry run that counts the memory",
    "model.converters": _CONVERTERS,
    "model.flavor": _MODULE,
    "model.name": _MODULE,
    "model.tokenizer_path": _MODEL,
    "optimizer.fused": "--optimizer.implementation fused",
    "training.batch_size": _LOCAL_BATCH,
    "training.compile": _COMPILE,
    "training.dataset": _DATASET,
    "training.dataset_path": _DATASET,
    "training.seed": _SEED,
    "validation.enabled": "--validator.enable",
    # litgpt
    "checkpoint_dir": _MODEL,
    "data": _DATASET,
    "devices": _PROCESSES,
    "eval.initial_validation": "--validator.at_start",
    "eval.interval": _VALIDATION,
    "eval.max_iters": "--validator.steps",
    "eval.max_new_tokens": _ANSWERS,
    "initial_checkpoint_dir": _MODEL,
    "logger_name": _LOGGERS,
    "lora_head": _TARGETS,
    "lora_key": _TARGETS,
    "lora_mlp": _TARGETS,
    "lora_projection": _TARGETS,
    "lora_query": _TARGETS,
    "lora_value": _TARGETS,
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
    "train.min_lr": "--lr_scheduler.min_lr_factor, a fraction of the rate",
    "train.save_interval": _INTERVAL,
    "train.tie_embeddings": "--model.tie_embeddings, which config.json sets with --module auto",
}
"""Name of an option elsewhere, without dashes before it → what to use here."""

"""Small files as users of other libraries write them, for a model in {model}, data in {data} and
pairs in {pairs}."""

AXOLOTL_LORA = """\
base_model: {model}
load_in_8bit: false
datasets:
  - path: {data}
    type: alpaca
val_set_size: 0
output_dir: ./outputs/lora
adapter: lora
lora_model_dir: {adapter}
sequence_len: 256
sample_packing: false
lora_r: 4
lora_alpha: 16
lora_dropout: 0.0
lora_target_modules:
  - q_proj
  - v_proj
  - down_proj
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 6
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 1e-2
train_on_inputs: false
bf16: false
gradient_checkpointing: true
logging_steps: 1
warmup_steps: 2
weight_decay: 0.0
flash_attention: true
special_tokens:
  pad_token: <|end_of_text|>
"""

AXOLOTL_QLORA_CHAT = """\
base_model: {model}
load_in_4bit: true
datasets:
  - path: json
    data_files: {chats}
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
test_datasets:
  - path: json
    data_files: {chats}
    split: train
adapter: qlora
sequence_len: 128
sample_packing: true
lora_r: 8
lora_alpha: 16
lora_target_linear: true
chat_template: tokenizer_default
micro_batch_size: 1
gradient_accumulation_steps: 4
max_steps: 20
optimizer: paged_adamw_8bit
lr_scheduler: constant
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: auto
eval_steps: 10
wandb_project: mine
"""

AXOLOTL_DPO = """\
base_model: {model}
rl: dpo
datasets:
  - path: {pairs}
    type: chat_template.default
chat_template: alpaca
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 1
num_epochs: 1
learning_rate: 5e-6
optimizer: adamw_bnb_8bit
lr_scheduler: linear
sequence_len: 128
warmup_steps: 1
"""

LLAMA_FACTORY_LORA = """\
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: mine
dataset_dir: {folder}
template: alpaca
cutoff_len: 128
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/lora
logging_steps: 10
save_steps: 500
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""

LLAMA_FACTORY_FULL = """\
model_name_or_path: {model}
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: mine
dataset_dir: {folder}
template: qwen
cutoff_len: 128
packing: true
mask_history: true
output_dir: saves/full
save_strategy: epoch
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
max_steps: 10
weight_decay: 0.1
lr_scheduler_type: constant_with_warmup
warmup_steps: 3
"""

TRL_SFT = """\
model_name_or_path: {model}
dataset_name: {data}
use_peft: true
lora_r: 4
lora_alpha: 8
learning_rate: 2.0e-4
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: false
max_length: 128
eval_strategy: "no"
report_to: tensorboard
chat_template_path: alpaca
output_dir: data/sft
"""

TRL_DPO = """\
#!/bin/bash
# an example
export OMP_NUM_THREADS=4
accelerate launch trl/scripts/dpo.py \\
    --model_name_or_path {model} \\
    --dataset_name {pairs} \\
    --learning_rate 5.0e-7 \\
    --num_train_epochs=1 \\
    --per_device_train_batch_size 2 \\
    --max_steps 10 \\
    --beta 0.05 --loss_type hinge \\
    --chat_template_path alpaca \\
    --no_remove_unused_columns
"""

TRANSFORMERS_JSON = """\
{{"model_name_or_path": "{model}", "dataset_name": "{data}", "learning_rate": 5e-05,
 "num_train_epochs": 2, "per_device_train_batch_size": 4, "weight_decay": 0.01,
 "chat_template_path": "alpaca", "warmup_ratio": 0.03, "lr_scheduler_type": "linear",
 "fp16": true, "max_length": 128}}
"""

TORCHTUNE_FULL = """\
output_dir: ./outputs/full
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: {model}/original/tokenizer.model
  max_seq_len: 256
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  source: {data}
  packed: False
seed: null
shuffle: True
model:
  _component_: torchtune.models.llama3_2.llama3_2_1b
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {model}
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${{output_dir}}
  model_type: LLAMA3_2
resume_from_checkpoint: False
batch_size: 4
epochs: 6
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 2e-3
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
max_steps_per_epoch: 1
gradient_accumulation_steps: 2
clip_grad_norm: null
compile: False
optimizer_in_bwd: False
enable_activation_checkpointing: True
enable_activation_offloading: False
device: cuda
dtype: fp32
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${{output_dir}}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
"""

TORCHTUNE_QLORA = """\
output_dir: ./outputs/qlora
model:
  _component_: torchtune.models.llama3_2.qlora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 4
  lora_alpha: 8
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: {model}/tokenizer.model
  max_seq_len: null
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {model}
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  source: {data}
  packed: True
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 3e-4
batch_size: 1
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 4
dtype: bf16
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""

LITGPT_LORA = """\
checkpoint_dir: {model}
out_dir: out/lora
precision: bf16-true
quantize:
devices: 1
lora_r: 4
lora_alpha: 16
lora_dropout: 0.05
lora_query: true
lora_key: false
lora_value: true
lora_projection: true
lora_mlp: true
data:
  class_path: litgpt.data.JSON
  init_args:
    json_path: {data}
    mask_prompt: false
    prompt_style: alpaca
train:
  save_interval: 200
  global_batch_size: 8
  micro_batch_size: 2
  lr_warmup_steps: 10
  epochs: 2
  max_seq_length: 128
  min_lr: 6.0e-05
eval:
  interval: 100
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 2e-4
    weight_decay: 0.0
    betas: [0.9, 0.95]
logger_name: csv
seed: 1337
"""

TORCHTITAN_TOML = """\
[job]
dump_folder = "./outputs"
description = "small"

[profiling]
enable_profiling = false

[metrics]
log_freq = 10

[model]
name = "llama3"
flavor = "debugmodel"
tokenizer_path = "{model}/tokenizer.json"

[optimizer]
name = "AdamW"
lr = 8e-4

[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
lr_min = 0.1

[training]
batch_size = 8
seq_len = 128
max_norm = 1.0
steps = 10
compile = false
dataset = "c4_test"

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
enable_async_tensor_parallel = false

[checkpoint]
enable_checkpoint = false
interval = 10

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[float8]
enable_fsdp_float8_all_gather = false
"""

TORCHTITAN_REGISTRY = """\
from somewhere import model_registry

SIZE = 4


def llama3_debugmodel() -> Trainer.Config:
    return Trainer.Config(
        hf_assets_path="{model}",
        model_spec=model_registry("debugmodel"),
        optimizer=OptimizersContainer.Config(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8),
        training=TrainingConfig(local_batch_size=SIZE, seq_len=128, steps=10),
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        checkpoint=CheckpointManager.Config(interval=10, last_save_model_only=False),
    )
"""

SAMPLES = {
    "axolotl_lora.yml": AXOLOTL_LORA.replace("lora_model_dir: {adapter}\n", ""),
    "axolotl_qlora.yml": AXOLOTL_QLORA_CHAT,
    "axolotl_dpo.yml": AXOLOTL_DPO,
    "factory_lora.yaml": LLAMA_FACTORY_LORA,
    "factory_full.yaml": LLAMA_FACTORY_FULL,
    "trl_sft.yaml": TRL_SFT,
    "trl_dpo.sh": TRL_DPO,
    "transformers.json": TRANSFORMERS_JSON,
    "tune_full.yaml": TORCHTUNE_FULL,
    "tune_qlora.yaml": TORCHTUNE_QLORA,
    "litgpt.yaml": LITGPT_LORA,
    "titan.toml": TORCHTITAN_TOML,
    "config_registry.py": TORCHTITAN_REGISTRY,
}
"""Name of a file → its text."""

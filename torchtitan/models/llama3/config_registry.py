"""Training configurations of Llama 3: `--module llama3 --config debugmodel`."""

import dataclasses
from pathlib import Path

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.lr_scheduler import LRScheduler
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import Optimizer
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.qat import QAT
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, TrainingConfig
from torchtitan.models.families import read_config_json
from torchtitan.models.llama3 import model_registry, model_spec
from torchtitan.models.llama3.hugging_face import from_config_json, precision_of
from torchtitan.trainer import Trainer


def llama3_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return Trainer.Config(
        model_spec=model_registry("debugmodel"),
        training=TrainingConfig(steps=100, seq_len=256, local_batch_size=8, mixed_precision_param="float32"),
        optimizer=Optimizer.Config(lr=2e-3),
        lr_scheduler=LRScheduler.Config(warmup_steps=10, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1),
        validator=Validator.Config(enable=True, freq=50, steps=10),
        checkpoint=CheckpointManager.Config(interval=50),
    )


def llama3_debugmodel_sft() -> Trainer.Config:
    """The small model on the built-in conversations: about two minutes on two CPU cores, no network.

    The tokenizer gets ChatML's tokens. `--checkpoint.initial_load_path` starts from what `debugmodel` has trained.
    """
    config = llama3_debugmodel()
    return dataclasses.replace(
        config,
        tokenizer=PretrainedTokenizer.Config(added_tokens=["<|im_start|>", "<|im_end|>"]),
        dataloader=SFTDataLoader.Config(dataset=["chats"], chat_template="chatml"),
        training=dataclasses.replace(config.training, seq_len=512, local_batch_size=4),
    )


def llama3_debugmodel_float8() -> Trainer.Config:
    """The small model with linear layers in float8, emulated, so that it runs anywhere and saves nothing."""
    config = llama3_debugmodel()
    config.model_converters = [Float8LinearConverter.Config(emulate=True, min_features=16)]
    return config


def llama3_debugmodel_qat() -> Trainer.Config:
    """The small model, which learns in its second half to be quantized: 4-bit weights, 8-bit activations."""
    config = llama3_debugmodel()
    config.model_converters = [QAT.Config(start_step=50)]
    return config


def llama3_debugmodel_lora() -> Trainer.Config:
    """Adapters of low rank on the small model, for the built-in conversations.

    `--checkpoint.initial_load_path` names the checkpoint of `debugmodel` that they are for; without one they learn on
    top of random weights.
    """
    return _small_adapters(LoRA.Config())


def llama3_debugmodel_dora() -> Trainer.Config:
    """As `llama3_debugmodel_lora`, with magnitudes that are trained apart from directions."""
    return _small_adapters(LoRA.Config(dora=True))


def llama3_debugmodel_qlora() -> Trainer.Config:
    """As `llama3_debugmodel_lora`, on weights in 4 bits."""
    return _small_adapters(QLoRA.Config())


def llama3_1b() -> Trainer.Config:
    """Llama 3.2 1B."""
    return _published("1B", "Llama-3.2-1B", lr=4e-4, local_batch_size=4, steps=10_000)


def llama3_3b() -> Trainer.Config:
    """Llama 3.2 3B."""
    return _published("3B", "Llama-3.2-3B", lr=4e-4, local_batch_size=2, steps=10_000)


def llama3_8b() -> Trainer.Config:
    """Llama 3.1 8B."""
    return _published("8B", "Llama-3.1-8B", lr=3e-4, local_batch_size=2, steps=10_000)


def llama3_8b_float8() -> Trainer.Config:
    """Llama 3.1 8B with linear layers in float8: for GPUs of compute capability 8.9 and above."""
    return dataclasses.replace(
        llama3_8b(),
        model_converters=[Float8LinearConverter.Config(fsdp_float8_all_gather=True)],
        # Casts that are not fused cost more than the products save.
        compile=CompileConfig(enable=True),
    )


def llama3_70b() -> Trainer.Config:
    """Llama 3.1 70B."""
    return _published("70B", "Llama-3.1-70B", lr=1.5e-4, local_batch_size=1, steps=10_000)


def llama3_405b() -> Trainer.Config:
    """Llama 3.1 405B."""
    return _published("405B", "Llama-3.1-405B", lr=8e-5, local_batch_size=1, steps=10_000)


def llama3_from_hf(hf_assets_path: str) -> Trainer.Config:
    """Fine-tunes the Llama-like model in a Hugging Face folder: `--config from_hf --hf_assets_path DIR`.

    DIR's config.json gives the sizes and the type to compute in, its other files weights and tokenizer. The rest is a
    start for full fine-tuning: a low rate with a short warm-up, samples of at most 2048 tokens, on C4; another data set
    is `--dataloader.dataset`.

    Raises:
        UserError: where DIR has no config.json, or one that describes a model that Llama 3's code does not compute.
    """
    _, description = read_config_json(Path(hf_assets_path))
    model = from_config_json(description)
    training = TrainingConfig(steps=1000, seq_len=min(2048, model.max_seq_len), local_batch_size=1)
    training.mixed_precision_param = precision_of(description, training.mixed_precision_param)
    return Trainer.Config(
        model_spec=model_spec(model, "from_hf"),
        hf_assets_path=hf_assets_path,
        dataloader=PretrainDataLoader.Config(dataset="c4", num_workers=2),
        training=training,
        optimizer=Optimizer.Config(lr=2e-5),
        lr_scheduler=LRScheduler.Config(warmup_steps=50, decay_type="cosine", min_lr_factor=0.1),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=500, initial_load_path=hf_assets_path, initial_load_in_hf=True
        ),
    )


def llama3_from_hf_sft(hf_assets_path: str) -> Trainer.Config:
    """Fine-tunes the Llama-like model in a Hugging Face folder on conversations or instructions:
    `--config from_hf_sft --hf_assets_path DIR --dataloader.dataset my.jsonl`.

    Weights, tokenizer and chat template are those of DIR, and the last checkpoint is such a folder. `--training.steps`
    says how long, or `--training.epochs`, which then counts instead.

    Raises:
        UserError: as `llama3_from_hf`.
    """
    return _for_conversations(llama3_from_hf(hf_assets_path))


def llama3_from_hf_lora(hf_assets_path: str) -> Trainer.Config:
    """Fine-tunes adapters of low rank for the Llama-like model in a Hugging Face folder:
    `--config from_hf_lora --hf_assets_path DIR --dataloader.dataset my.jsonl`.

    As `llama3_from_hf_sft`; the last checkpoint is a folder with the merged model, and in it the folder `adapter`,
    which peft opens on top of DIR. The checkpoints before it hold the adapters alone.

    Raises:
        UserError: as `llama3_from_hf`.
    """
    return _with_adapters(llama3_from_hf_sft(hf_assets_path), LoRA.Config())


def llama3_8b_lora() -> Trainer.Config:
    """Adapters of low rank for Llama 3.1 8B Instruct, on conversations: `--dataloader.dataset my.jsonl`."""
    return _with_adapters(llama3_8b_sft(), LoRA.Config())


def llama3_8b_qlora() -> Trainer.Config:
    """As `llama3_8b_lora`, on weights in 4 bits: 20.4 GiB at the peak of a step on one GPU, by a dry run."""
    return _with_adapters(llama3_8b_sft(), QLoRA.Config())


def llama3_8b_sft() -> Trainer.Config:
    """Llama 3.1 8B Instruct on conversations or instructions: `--dataloader.dataset my.jsonl`."""
    return _for_conversations(_published("8B", "Llama-3.1-8B-Instruct", lr=2e-5, local_batch_size=2, steps=300))


def _small_adapters(adapters: LoRA.Config) -> Trainer.Config:
    """The small model with `adapters`, on the built-in conversations as plain text: tokens that a template adds would
    have frozen rows."""
    config = _with_adapters(llama3_debugmodel_sft(), adapters, lr=5e-3)
    config.tokenizer = PretrainedTokenizer.Config()
    config.dataloader = SFTDataLoader.Config(dataset=["chats"], chat_template="alpaca")
    return config


def _with_adapters(config: Trainer.Config, adapters: LoRA.Config, lr: float = 2e-4) -> Trainer.Config:
    """`config` with only adapters trained: at a rate of their own, and without decay, which would pull the weights that
    they change back to those they began with. Checkpoints to resume from hold the adapters alone."""
    return dataclasses.replace(
        config,
        model_converters=[adapters],
        optimizer=Optimizer.Config(lr=lr, weight_decay=0.0, param_groups={}),
        checkpoint=dataclasses.replace(config.checkpoint, trained_only=True),
    )


def _for_conversations(config: Trainer.Config) -> Trainer.Config:
    """`config` for conversations that the user has to name; its weights from a Hugging Face folder, and into one."""
    training = dataclasses.replace(config.training, steps=300, seq_len=min(2048, config.model_spec.model.max_seq_len))
    return dataclasses.replace(
        config,
        dataloader=SFTDataLoader.Config(dataset=[]),
        training=training,
        optimizer=Optimizer.Config(lr=2e-5),
        lr_scheduler=LRScheduler.Config(warmup_steps=10, decay_type="cosine", min_lr_factor=0.1),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=500,
            keep_latest_k=2,
            initial_load_path=config.hf_assets_path,
            initial_load_in_hf=True,
            last_save_in_hf=True,
            export_dtype=training.mixed_precision_param,
        ),
    )


def _published(flavor: str, assets: str, *, lr: float, local_batch_size: int, steps: int) -> Trainer.Config:
    """Pre-training on C4 with the tokenizer in ./assets/hf/<model>.

    The learning rates of 8B and above are those of the Llama 3 report (arXiv:2407.21783, table 3).
    """
    return Trainer.Config(
        model_spec=model_registry(flavor),
        hf_assets_path=f"./assets/hf/{assets}",
        dataloader=PretrainDataLoader.Config(dataset="c4", num_workers=2),
        training=TrainingConfig(steps=steps, seq_len=8192, local_batch_size=local_batch_size),
        optimizer=Optimizer.Config(lr=lr),
        lr_scheduler=LRScheduler.Config(warmup_steps=600, decay_type="cosine", min_lr_factor=0.1),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
        checkpoint=CheckpointManager.Config(enable=True, interval=500),
    )

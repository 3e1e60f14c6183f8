"""Training configurations for the model in a Hugging Face folder: `--module auto --config sft
--hf_assets_path DIR`.

The config.json determines family, sizes and data type. `--module PATH` of a family offers these
configurations too, and prefers that family (argument `family`). Each function raises `UserError`
for a missing file or an unsupported model.
"""

import dataclasses
from pathlib import Path
from types import ModuleType

from torchtitan.components.images.streams import ImageStreamDataLoader
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.models.common.hugging_face_keys import precision_of
from torchtitan.models.common.recipes import (
    balanced,
    for_conversations,
    large_run,
    with_adapters,
    with_images,
)
from torchtitan.models.pretrained import huggingface_model
from torchtitan.trainer import Trainer


def pretrain(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Continue pre-training on plain text: `--dataloader.dataset my.txt`, default C4. The learning
    rate is low, with a short warm-up, and windows have at most 2048 tokens."""
    spec, document = huggingface_model(Path(hf_assets_path), family)
    seq_len = min(2048, spec.model.max_seq_len)
    config = large_run(
        spec,
        hf_assets_path,
        lr=2e-5,
        local_batch_size=1,
        steps=1000,
        seq_len=seq_len,
        warmup_steps=50,
    )
    config.training.mixed_precision_param = precision_of(
        document, config.training.mixed_precision_param
    )
    config.checkpoint.initial_load_path, config.checkpoint.initial_load_in_hf = hf_assets_path, True
    return config


def scratch(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Pre-train the model that config.json describes from random weights, on C4 or
    `--dataloader.dataset my.txt`. The folder holds config.json and the tokenizer."""
    spec, document = huggingface_model(Path(hf_assets_path), family)
    seq_len = min(2048, spec.model.max_seq_len)
    config = large_run(spec, hf_assets_path, lr=3e-4, local_batch_size=1, seq_len=seq_len)
    config.training.mixed_precision_param = precision_of(
        document, config.training.mixed_precision_param
    )
    return balanced(config) if hasattr(spec.model, "moe") else config


def sft(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Fine-tune on conversations or instructions, `--dataloader.dataset my.jsonl`, for
    `--training.steps` or `.epochs`. The last checkpoint is a Hugging Face folder again."""
    return for_conversations(pretrain(hf_assets_path, family))


def lora(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Fine-tune low-rank adapters, as `sft` does the model. Checkpoints contain only the adapters,
    except the last: the merged model, with a subfolder `adapter` that peft loads on top of DIR."""
    return with_adapters(sft(hf_assets_path, family), LoRA.Config())


def qlora(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Fine-tune as `lora`, with the base weights in few bits: as published, otherwise NF4."""
    return with_adapters(sft(hf_assets_path, family), QLoRA.Config())


def pretrain_images(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Continue pre-training on texts with images that are streamed, `--dataloader.dataset
    org/name`, as `pretrain` does on text. The class of transformers computes the model."""
    from torchtitan.models import transformers  # takes seconds, and belongs to an extra

    config = with_images(pretrain(hf_assets_path, transformers))
    return dataclasses.replace(config, dataloader=ImageStreamDataLoader.Config())


def sft_images(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Fine-tune on conversations with images, `--dataloader.dataset my.jsonl`, as `sft` does on
    text. The class of transformers computes the model, of any family."""
    from torchtitan.models import transformers  # takes seconds, and belongs to an extra

    return with_images(sft(hf_assets_path, transformers))


def lora_images(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Fine-tune low-rank adapters on conversations with images, as `lora` does on text."""
    return with_adapters(sft_images(hf_assets_path), LoRA.Config())


def qlora_images(hf_assets_path: str, family: ModuleType | None = None) -> Trainer.Config:
    """Fine-tune as `lora_images`, with the adapted layers of the language model in few bits: as
    published, otherwise NF4. The projector and the vision tower keep their precision, and are
    frozen."""
    config = with_adapters(sft_images(hf_assets_path), QLoRA.Config())
    config.model_spec.model.train = ["language"]  # type: ignore[attr-defined]
    return config

"""Training configurations of Llama 3: `--module llama3 --config debugmodel`."""

import dataclasses

from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.narrow import MXFP8, NVFP4
from torchtitan.components.quantization.qat import QAT
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config import CompileConfig
from torchtitan.models.common.recipes import for_conversations, published, small_run, with_adapters
from torchtitan.models.llama3 import FAMILY, model_registry
from torchtitan.protocols import ModelConverter
from torchtitan.trainer import Trainer


def llama3_debugmodel() -> Trainer.Config:
    """A small model on the built-in stories: about a minute on two CPU cores, no network."""
    return small_run(model_registry("debugmodel"))


def llama3_debugmodel_sft() -> Trainer.Config:
    """Train the small model on the built-in conversations: about two minutes on two CPU cores, no
    network. The tokenizer gets ChatML's tokens. `--checkpoint.initial_load_path` starts from a
    checkpoint of `debugmodel`."""
    config = llama3_debugmodel()
    return dataclasses.replace(
        config,
        tokenizer=PretrainedTokenizer.Config(added_tokens=["<|im_start|>", "<|im_end|>"]),
        dataloader=SFTDataLoader.Config(dataset=["chats"], chat_template="chatml"),
        training=dataclasses.replace(config.training, seq_len=512, local_batch_size=4),
        checkpoint=dataclasses.replace(config.checkpoint, enable=True),
    )


def llama3_debugmodel_float8() -> Trainer.Config:
    """The small model with linear layers in emulated float8, which runs on any device but saves no
    time or memory."""
    return _small_converted(Float8LinearConverter.Config(emulate=True, min_features=16))


def llama3_debugmodel_mxfp8() -> Trainer.Config:
    """The small model with linear layers in MXFP8, emulated without the instructions."""
    return _small_converted(MXFP8.Config(min_features=32))


def llama3_debugmodel_nvfp4() -> Trainer.Config:
    """The small model with linear layers in NVFP4, emulated without the instructions; the last
    block stays wide."""
    return _small_converted(NVFP4.Config(min_features=16, exclude=[r"layers\.3\."]))


def llama3_debugmodel_qat() -> Trainer.Config:
    """The small model, trained in its second half for quantization: 4-bit weights, 8-bit
    activations."""
    return _small_converted(QAT.Config(start_step=50))


def llama3_debugmodel_lora() -> Trainer.Config:
    """Train low-rank adapters of the small model on the built-in conversations, starting from a
    checkpoint of `debugmodel` (`--checkpoint.initial_load_path`) or random weights."""
    return _small_adapters(LoRA.Config())


def llama3_debugmodel_dora() -> Trainer.Config:
    """Train DoRA: as `llama3_debugmodel_lora`, with magnitudes trained separately from
    directions."""
    return _small_adapters(LoRA.Config(dora=True))


def llama3_debugmodel_qlora() -> Trainer.Config:
    """Train QLoRA: as `llama3_debugmodel_lora`, with the base weights in 4 bits."""
    return _small_adapters(QLoRA.Config())


# Learning rates of 8B and above are from arXiv:2407.21783, table 3.
llama3_1b = published(FAMILY, "1B", "Llama-3.2-1B", lr=4e-4, local_batch_size=4)
llama3_3b = published(FAMILY, "3B", "Llama-3.2-3B", lr=4e-4, local_batch_size=2)
llama3_8b = published(FAMILY, "8B", "Llama-3.1-8B", lr=3e-4, local_batch_size=2)
llama3_70b = published(FAMILY, "70B", "Llama-3.1-70B", lr=1.5e-4, local_batch_size=1)
llama3_405b = published(FAMILY, "405B", "Llama-3.1-405B", lr=8e-5, local_batch_size=1)


def llama3_8b_float8() -> Trainer.Config:
    """Llama 3.1 8B with linear layers in float8: for GPUs of compute capability 8.9 and above."""
    return dataclasses.replace(
        llama3_8b(),
        model_converters=[Float8LinearConverter.Config(fsdp_float8_all_gather=True)],
        # Without compilation, casts are not fused and cost more than the matrix products save.
        compile=CompileConfig(enable=True),
    )


def llama3_8b_mxfp8() -> Trainer.Config:
    """Llama 3.1 8B with linear layers in MXFP8: for GPUs of compute capability 10."""
    return dataclasses.replace(
        llama3_8b(),
        model_converters=[MXFP8.Config(min_features=1024)],
        compile=CompileConfig(enable=True),
    )


def llama3_8b_nvfp4() -> Trainer.Config:
    """Llama 3.1 8B with linear layers in NVFP4, except in the last four blocks: for GPUs of
    compute capability 10."""
    return dataclasses.replace(
        llama3_8b(),
        model_converters=[NVFP4.Config(min_features=1024, exclude=[r"layers\.(28|29|30|31)\."])],
        compile=CompileConfig(enable=True),
    )


def llama3_8b_lora() -> Trainer.Config:
    """Low-rank adapters of Llama 3.1 8B Instruct, on conversations: `--dataloader.dataset
    my.jsonl`."""
    return with_adapters(llama3_8b_sft(), LoRA.Config())


def llama3_8b_qlora() -> Trainer.Config:
    """QLoRA: `llama3_8b_lora` with base weights in 4 bits. A step peaks at 20.4 GiB on one GPU, by
    a dry run."""
    return with_adapters(llama3_8b_sft(), QLoRA.Config())


def llama3_8b_sft() -> Trainer.Config:
    """Llama 3.1 8B Instruct on conversations or instructions: `--dataloader.dataset my.jsonl`."""
    return for_conversations(
        published(FAMILY, "8B", "Llama-3.1-8B-Instruct", lr=2e-5, local_batch_size=2)()
    )


def _small_converted(converter: ModelConverter.Config) -> Trainer.Config:
    """Pre-train the small model with a converter, for minutes if it is emulated."""
    config = llama3_debugmodel()
    config.model_converters = [converter]
    config.checkpoint.enable = True
    return config


def _small_adapters(adapters: LoRA.Config) -> Trainer.Config:
    """Train adapters on the built-in conversations as plain text; tokens added by a template would
    have frozen rows."""
    config = with_adapters(llama3_debugmodel_sft(), adapters, lr=5e-3)
    config.tokenizer = PretrainedTokenizer.Config()
    config.dataloader = SFTDataLoader.Config(dataset=["chats"], chat_template="alpaca")
    return config

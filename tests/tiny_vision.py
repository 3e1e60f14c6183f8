"""Tiny random models of images and text, in the folders that transformers saves, and what its own
processors make of conversations with images."""

import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

VOCABULARY = 384
HIDDEN = 32
Conversation = list[dict[str, Any]]

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 8,
    "image_size": 32,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": HIDDEN,
}
_QWEN_PIXELS = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
}
_SQUARE = {"size": {"height": 32, "width": 32}}
_COMMON_TOKENS = {
    "pad_token": "<pad>",
    "eos_token": "<|im_end|>",
    "start_token": "<|im_start|>",
}
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ 'IMAGE' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclass(frozen=True)
class VisionType:
    """What differs between types of models."""

    processor: str
    """Name of the class of the processor."""
    image_processor: str
    tokens: dict[str, str]
    """Special tokens by the names that the processor looks up in the tokenizer."""
    placeholder: str
    """What the chat template writes for an image."""
    ids: dict[str, str]
    """Field of the configuration → the special token whose id it holds."""
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=lambda: dict(_VISION))
    config: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Any] = field(default_factory=lambda: dict(_SQUARE))
    """Values of the image processor."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Values of the processor."""
    takes_textless: bool = True
    """False if the processor refuses batches with samples without images."""


def _qwen(processor: str, text: dict[str, Any], vision: dict[str, Any]) -> VisionType:
    tokens = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }
    return VisionType(
        processor=processor,
        image_processor="Qwen2VLImageProcessor",
        tokens=tokens,
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        ids={f"{name}_id": token for name, token in tokens.items()},
        text=text,
        vision=_QWEN_VISION | vision,
        pixels=_QWEN_PIXELS,
    )


def _mrope(*sections: int) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}
    return {"rope_parameters": parameters}


def _idefics(processor: str, image_processor: str, ids: dict[str, str]) -> VisionType:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return VisionType(
        processor=processor,
        image_processor=image_processor,
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        }
        | {row: row for row in rows},
        placeholder="<image>",
        ids=ids,
        config={"scale_factor": 2},
        pixels={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        arguments={"image_seq_len": 4},
    )


_TYPES: dict[str, VisionType] = {
    "qwen3_vl": _qwen(
        "Qwen3VLProcessor",
        _mrope(2, 1, 1),
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "smolvlm": _idefics("SmolVLMProcessor", "SmolVLMImageProcessor", {"image_token_id": "<image>"}),
    "gemma3": VisionType(
        processor="Gemma3Processor",
        image_processor="Gemma3ImageProcessor",
        tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        placeholder="<start_of_image>",
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        text={"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        config={"mm_tokens_per_image": 4},
        arguments={"image_seq_length": 4},
    ),
    "llava": VisionType(
        processor="LlavaProcessor",
        image_processor="CLIPImageProcessor",
        tokens={"image_token": "<image>"},
        placeholder="<image>",
        ids={"image_token_index": "<image>"},
        pixels={"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        arguments={
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
    "internvl": VisionType(
        processor="InternVLProcessor",
        image_processor="GotOcr2ImageProcessor",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        placeholder="<IMG_CONTEXT>\n",
        ids={"image_token_id": "<IMG_CONTEXT>"},
        vision=_VISION | {"patch_size": [8, 8], "image_size": [32, 32]},
        config={"image_seq_length": 4},
        pixels=_SQUARE | {"max_patches": 3, "crop_to_patches": True},
        arguments={"image_seq_length": 4},
    ),
}

VISION_TYPES: tuple[str, ...] = tuple(_TYPES)


def vision_folder(model_type: str, folder: Path) -> Path:
    """Save a tiny random model with its processor in `folder`, and return it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind = _TYPES[model_type]
    ids = _save_tokenizer(kind, folder)
    config = AutoConfig.for_model(
        model_type,
        text_config=_sub_config(model_type, "text_config", _TEXT | kind.text),
        vision_config=_sub_config(model_type, "vision_config", kind.vision),
        **kind.config,
        **{name: ids[token] for name, token in kind.ids.items()},
    )
    for part in (config, config.get_text_config()):
        part.pad_token_id = ids["<pad>"]
        part.bos_token_id, part.eos_token_id = None, ids["<|im_end|>"]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():  # large enough that every part changes the loss
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    image_processor = kind.pixels | {"image_processor_type": kind.image_processor}
    _write_json(folder / "preprocessor_config.json", image_processor)
    processor = kind.arguments | {"processor_class": kind.processor}
    _write_json(folder / "processor_config.json", processor)
    return folder


def _sub_config(model_type: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the type of a part of the default configuration."""
    from transformers import AutoConfig

    part = getattr(AutoConfig.for_model(model_type), name)
    return {**values, "model_type": part.model_type}


def _save_tokenizer(kind: VisionType, folder: Path) -> dict[str, int]:
    """Save a tokenizer of bytes, of two and three line breaks, and of the special tokens. Return
    the ids of special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _COMMON_TOKENS | kind.tokens
    newline = "Ċ"  # a line break, in the spelling of byte-level tokenizers
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), 2 * newline, 3 * newline]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(alphabet)},
            merges=[(newline, newline), (2 * newline, newline)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in dict.fromkeys(tokens.values())]
    )
    assert tokenizer.get_vocab_size() <= VOCABULARY
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": tokens["pad_token"],
        "eos_token": tokens["eos_token"],
        "extra_special_tokens": {
            name: text for name, text in kind.tokens.items() if name.endswith("_token")
        },
        "model_max_length": 4096,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    template = _TEMPLATE.replace("IMAGE", kind.placeholder.replace("\n", "\\n"))
    (folder / "chat_template.jinja").write_text(template)
    return {text: tokenizer.token_to_id(text) for text in tokens.values()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))


def takes_textless(model_type: str) -> bool:
    """Return whether the type's processor takes batches with samples without images."""
    return _TYPES[model_type].takes_textless


def text_of(folder: Path, messages: Conversation) -> str:
    """Return the text of a conversation, by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)


@functools.lru_cache
def reference_processor(model_type: str, folder: Path) -> Any:
    """Return transformers' processor of a folder, without its part for videos."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.processing_utils import ProcessorMixin

    kind = _TYPES[model_type]
    cls = getattr(transformers, kind.processor)
    parts = {
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"),
    }
    parts |= {name: None for name in cls.get_attributes() if name not in parts}
    module = importlib.import_module(cls.__module__)
    with (
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
        mock.patch.object(module, "num2words", str, create=True),
    ):
        return cls(**parts, **kind.arguments)


def reference_inputs(
    model_type: str, folder: Path, conversations: Sequence[Conversation], images: Sequence[Any]
) -> dict[str, Any]:
    """Return what transformers' processor makes of conversations and of the images of each, padded
    on the right."""
    processor = reference_processor(model_type, folder)
    return dict(
        processor(
            text=[text_of(folder, messages) for messages in conversations],
            images=list(images),
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
    )

"""Tiny random models of images and text, in the folders that transformers saves, and what its own
processors make of conversations with images."""

import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.conftest import PROJECT
from tests.more_vision_types import MORE_TYPES
from tests.vision_types import HIDDEN, TYPES, VOCABULARY, VisionType
from tests.vision_types_b_to_g import B_TO_G
from tests.vision_types_i_to_m import I_TO_M_IN_ROWS, I_TO_M_TYPES
from tests.vision_types_leading import LEADING_TYPES, PLACING_TYPES
from tests.vision_types_m_to_v import ROWS_M_TO_V, TYPES_M_TO_V
from tests.vision_types_of_captions import CAPTION_TYPES
from tests.vision_types_of_decoders import DECODER_TYPES
from tests.vision_types_of_timm import TYPES_OF_JOINED_TILES, TYPES_OF_TIMM, TYPES_OF_TORCHVISION
from torchtitan.components.images.opening import pixtral_class

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

_TYPES = TYPES | MORE_TYPES | B_TO_G | I_TO_M_TYPES | TYPES_M_TO_V
_TYPES |= TYPES_OF_TORCHVISION | TYPES_OF_TIMM | LEADING_TYPES | PLACING_TYPES
_TYPES |= CAPTION_TYPES | DECODER_TYPES

VISION_TYPES: tuple[str, ...] = tuple(TYPES)


def documented_template(word: str) -> str:
    """The chat template of docs/images.md that contains a word."""
    found = re.findall(r"```jinja\n(.*?)```", (PROJECT / "docs/images.md").read_text(), re.S)
    return str(next(text for text in found if word in text))


ALL_VISION_TYPES: tuple[str, ...] = tuple(
    name for name in _TYPES if name not in CAPTION_TYPES | DECODER_TYPES
)
"""Also those of which fewer tests train a model; but none that reads one image before each text, or
in its encoder."""

IN_ROWS = ("qwen3_5", "hunyuan_vl", "qwen3_5_moe", "granite4_vision", "deepseek_vl_hybrid")
IN_ROWS += ("glm5_next", "chameleon")
IN_ROWS += I_TO_M_IN_ROWS
IN_ROWS += ROWS_M_TO_V
IN_ROWS += (*LEADING_TYPES, "idefics")
"""Types that get a row for each packed document: the states of linear attention continue in the
next document; positions count the images of a batch; the trial sees too little, since the class
excludes tokens by the least number; or it cannot give the class features in the place of images."""


def vision_folder(model_type: str, folder: Path, **text: Any) -> Path:
    """Save a tiny random model with its processor in `folder`, and return it. `text` are values of
    its language model's configuration."""
    kind = _TYPES[model_type]
    vision_model(model_type, **text).save_pretrained(folder)
    _tokenizer(kind).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _COMMON_TOKENS["pad_token"],
        "eos_token": _COMMON_TOKENS["eos_token"],
        "extra_special_tokens": {
            name: text for name, text in kind.tokens.items() if name.endswith("_token")
        },
        "model_max_length": 4096,
        **kind.settings,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    template = _TEMPLATE.replace("IMAGE", kind.placeholder.replace("\n", "\\n"))
    (folder / "chat_template.jinja").write_text(template)
    image_processor = kind.pixels | {"image_processor_type": kind.image_processor}
    _write_json(folder / "preprocessor_config.json", image_processor)
    processor = kind.arguments | {"processor_class": kind.processor}
    _write_json(folder / "processor_config.json", processor)
    if kind.processor == "InstructBlipProcessor":
        _write_second_tokenizer(folder / "qformer_tokenizer")
    return folder


def _write_second_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters, which begins and ends each text as BERT's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*special, *"abcdefghijklmnopqrstuvwxyz.:?"]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    letters = pre_tokenizers.Split("", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), letters])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    settings |= {"padding_side": "left"}  # which changes the positions of shorter prompts
    _write_json(folder / "tokenizer_config.json", settings)


def write_scores(folder: Path) -> Path:
    """Make the model in a folder of `vision_folder` a random reward model, in the form of
    transformers' classes with one label."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    score = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    save_file(weights | {"score.weight": score}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    [name] = config["architectures"]
    architecture = name.partition("For")[0] + "ForSequenceClassification"
    _write_json(folder / "config.json", config | {"num_labels": 1, "architectures": [architecture]})
    return folder


def bare_folder(
    model_type: str, folder: Path, image_processor: str, config: Mapping[str, Any]
) -> Path:
    """Write the folder of a type with its processor and without weights, and return it."""
    from safetensors.torch import save_file
    from transformers import AutoConfig
    from transformers.models.auto import processing_auto

    folder.mkdir()
    described = AutoConfig.for_model(model_type, **config)
    (folder / "config.json").write_text(described.to_json_string(use_diff=False))
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    names = ["<image>", "|SPEAKER|", "|NEWLINE|"]
    named = {f"{name}_token": f"<{name}>" for name in ("boi", "eoi", "audio", "boa", "eoa")}
    tokens = named | {name: name for name in names}
    kind = VisionType(image_processor, image_processor, tokens, "<image>", {})
    _tokenizer(kind).save(str(folder / "tokenizer.json"))
    if model_type == "diffusion_gemma":
        named |= {"image_token": "<image>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    settings |= {"eos_token": "<|im_end|>", "extra_special_tokens": named}
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("IMAGE", "<image>"))
    _write_json(folder / "preprocessor_config.json", {"image_processor_type": image_processor})
    cls = processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type)
    _write_json(folder / "processor_config.json", {} if cls is None else {"processor_class": cls})
    return folder


def vision_model(model_type: str, **text: Any) -> Any:
    """Return a tiny random model of a type; `text` as for `vision_folder`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind = _TYPES[model_type]
    tokenizer = _tokenizer(kind)
    assert tokenizer.get_vocab_size() <= VOCABULARY
    ids = {text: tokenizer.token_to_id(text) for text in _special_tokens(kind)}
    of_text, of_vision = kind.sections
    model_type = kind.model_type or model_type
    config = AutoConfig.for_model(
        model_type,
        **_sub_config(model_type, of_text, _TEXT | kind.text | text),
        **_sub_config(model_type, of_vision, kind.vision),
        **kind.config,
        **{name: ids[token] for name, token in kind.ids.items()},
        **{name: [ids[token] for token in tokens] for name, tokens in kind.id_lists.items()},
        **{name: {token: ids[token] for token in tokens} for name, tokens in kind.id_maps.items()},
    )
    for part in (config, config.get_text_config()):
        part.pad_token_id = ids["<pad>"]
        part.bos_token_id = ids.get(kind.tokens.get("bos_token", ""))
        part.eos_token_id = ids["<|im_end|>"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():  # large enough that every part changes the loss
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            elif parameter.numel() == 1 and not parameter:  # the gate of a layer
                parameter.fill_(0.5)
        if model_type == "emu3":
            _spread_codes(model.model.vqmodel)
    return model


def _spread_codes(tokenizer: Any) -> None:
    """Give a random tokenizer of images the features of noise as codes: all images would have one
    code otherwise."""

    def keep(quantize: Any, args: Any) -> None:
        [features_TCHW] = args[0]
        quantize.embedding.weight.copy_(features_TCHW[0].flatten(1).T)

    hook = tokenizer.quantize.register_forward_pre_hook(keep)
    tokenizer.encode(torch.randn(1, 3, 32, 32), torch.tensor([[32, 32]]))
    hook.remove()


def _sub_config(model_type: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with these values and the type of a part of the default configuration; the
    values alone for a configuration without such a section."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    if name not in default.sub_configs:
        return {**values}
    part = getattr(default, name)
    return {name: {**values} if part is None else {"model_type": part.model_type, **values}}


def _special_tokens(kind: VisionType) -> list[str]:
    return list(dict.fromkeys((_COMMON_TOKENS | kind.tokens).values()))


def _tokenizer(kind: VisionType) -> Any:
    """Return a tokenizer of bytes, of two and three line breaks, and of the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
        [AddedToken(text, normalized=False) for text in _special_tokens(kind)]
    )
    return tokenizer


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))


def parts_in(folder: Path) -> list[str]:
    """Return the parts of the class of a type's folder, all of them for another folder."""
    kind = _TYPES.get(folder.name)
    return list(VisionType.parts if kind is None else kind.parts)


def in_projector(model_type: str, name: str) -> bool:
    """Return whether a parameter belongs to the projector."""
    return bool(re.match(_TYPES[model_type].projector, name))


@functools.lru_cache
def reference_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def text_of(folder: Path, messages: Conversation, **options: Any) -> str:
    """Return the text of a conversation, by transformers."""
    tokenizer = reference_tokenizer(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def set_training(model: Any) -> None:
    """Set the mode of a class for training, but not of modules that the class builds in evaluation
    mode, such as tokenizers of images, and of batch normalization, whose statistics are kept."""
    from transformers import AutoModelForImageTextToText

    model.train()
    for name, module in AutoModelForImageTextToText.from_config(model.config).named_modules():
        keeps_statistics = isinstance(module, torch.nn.BatchNorm2d)  # of FastVLM's tower
        model.get_submodule(name).train(module.training and not keeps_statistics)


def in_float32(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of a class in float32: Llama 4's processor rounds pixels to bfloat16. Lists,
    such as Unlimited-OCR's of crops, stay."""
    return {
        name: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@functools.lru_cache
def reference_processor(model_type: str, folder: Path) -> Any:
    """Return transformers' processor of a folder, without its part for videos."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.processing_utils import ProcessorMixin

    kind = _TYPES[model_type]
    cls = getattr(transformers, kind.processor)
    if getattr(cls, "is_dummy", False):  # of Mistral 3, without torchvision
        cls = pixtral_class()
    parts = {
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "image_processor": AutoImageProcessor.from_pretrained(folder),
    }
    if "qformer_tokenizer" in cls.get_attributes():
        second = AutoTokenizer.from_pretrained(folder / "qformer_tokenizer", padding_side="right")
        parts["qformer_tokenizer"] = second
    parts |= {name: None for name in cls.get_attributes() if name not in parts}
    if kind.processor.startswith("MiniCPM"):
        parts["video_processor"] = SimpleNamespace(slice_mode=True, downsample_mode="16x")
    module = importlib.import_module(cls.__module__)
    with (
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
        mock.patch.object(module, "num2words", str, create=True),
    ):
        return cls(**parts, **kind.arguments)


def reference_inputs(
    model_type: str,
    folder: Path,
    conversations: Sequence[Conversation],
    images: Sequence[Any],
    **template: Any,
) -> dict[str, Any]:
    """Return what transformers' processor makes of conversations and of the images of each, padded
    on the right."""
    if model_type in LEADING_TYPES:
        texts = [text_of(folder, messages, **template) for messages in conversations]
        return _leading_inputs(model_type, folder, texts, images)
    if model_type == "idefics":
        texts = [text_of(folder, messages, **template) for messages in conversations]
        return _idefics_inputs(folder, texts, images)
    if model_type == "fuyu":
        texts = [text_of(folder, messages, **template) for messages in conversations]
        return _fuyu_inputs(folder, texts, images)
    if model_type == "emu3":
        texts = [text_of(folder, messages, **template) for messages in conversations]
        return _emu3_inputs(folder, texts, images)
    call = reference_processor(model_type, folder)
    nested = [list(sample) for sample in images]
    flat: list[Any] = sum(nested, [])
    joins = model_type in TYPES_OF_JOINED_TILES
    inputs = dict(
        call(
            text=[text_of(folder, messages, **template) for messages in conversations],
            images=(flat if _TYPES[model_type].is_flat else nested) if flat else None,
            padding=True,
            padding_side="right",
            return_tensors=None if joins else "pt",
            **_TYPES[model_type].options,
        )
    )
    if joins:
        inputs = {name: torch.tensor(inputs[name]) for name in ("input_ids", "attention_mask")}
        tiles = [call.image_processor(image, return_tensors="pt")["pixel_values"] for image in flat]
        inputs["pixel_values"] = torch.cat(tiles, dim=1)
    of_text = [name for name in inputs if name.endswith(("_ids", "attention_mask"))]
    n_before = _TYPES[model_type].n_before
    return inputs | {name: inputs[name][:, n_before:] for name in of_text if n_before}


def _leading_inputs(
    model_type: str, folder: Path, texts: Sequence[str], images: Sequence[Any]
) -> dict[str, Any]:
    """Return texts with what the processor writes before a text for each image, in the place of the
    image."""
    from torch.nn.utils.rnn import pad_sequence

    call, tokenizer = reference_processor(model_type, folder), reference_tokenizer(folder)
    pixels: dict[str, list[Any]] = {}
    ids, masks = [], []
    for text, sample in zip(texts, images, strict=True):
        first, *others = text.split("<image>")
        row = tokenizer(first, add_special_tokens=False)["input_ids"]
        mask = [0] * len(row)
        for image, other in zip(sample, others, strict=True):
            outputs = dict(call(text=["q"], images=[image], return_tensors="pt"))
            [own], [places] = outputs.pop("input_ids"), outputs.pop("image_embeds_position_mask")
            after = tokenizer(other, add_special_tokens=False)["input_ids"]
            start, stop = places.tolist().index(1) - 1, int(places.nonzero()[-1]) + 1
            stop += int(places[stop - 1] == 1)  # the token that ends an image
            row += own[start:stop].tolist() + after
            mask += places[start:stop].tolist() + [0] * len(after)
            outputs.pop("attention_mask")
            for name, value in outputs.items():
                pixels.setdefault(name, []).append(value)
        ids.append(torch.tensor(row))
        masks.append(torch.tensor(mask))
    inputs: dict[str, Any] = {name: torch.cat(values) for name, values in pixels.items()}
    if not inputs:  # the class computes no text alone otherwise
        inputs["image_embeds"] = torch.zeros(0, 1, HIDDEN)
    of_tokens = [ids, masks, [torch.ones_like(row) for row in ids]]
    names = ("input_ids", "image_embeds_position_mask", "attention_mask")
    padded = (pad_sequence(rows, batch_first=True) for rows in of_tokens)
    return inputs | dict(zip(names, padded, strict=True))


def _idefics_inputs(folder: Path, texts: Sequence[str], images: Sequence[Any]) -> dict[str, Any]:
    """Return texts with placed images as the processor does those that it places, by its own
    functions."""
    from transformers.models.idefics.processing_idefics import (
        image_attention_mask_for_packed_input_ids as incremental_mask,
    )
    from transformers.models.idefics.processing_idefics import (
        incremental_to_binary_attention_mask as binary_mask,
    )

    call, tokenizer = reference_processor("idefics", folder), reference_tokenizer(folder)
    inputs = dict(tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt"))
    most = max(1, *map(len, images))
    mask, _ = incremental_mask(inputs["input_ids"], tokenizer, "pt")
    pixels = torch.zeros(len(texts), most, 3, 32, 32)
    for row, sample in enumerate(images):
        if sample:
            pixels[row, : len(sample)] = call.image_processor(list(sample), return_tensors="pt")
    mask = binary_mask(mask, "pt", num_classes=most)
    return {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "pixel_values": pixels,
        "image_attention_mask": mask,
    }


def _fuyu_inputs(folder: Path, texts: Sequence[str], images: Sequence[Any]) -> dict[str, Any]:
    """Return texts with rows of tokens in the place of images, and the patches of all images, in
    the order of the class: by rows, columns and colors. Its own processor fails with Pillow."""
    from torch.nn.utils.rnn import pad_sequence

    call, tokenizer = reference_processor("fuyu", folder), reference_tokenizer(folder)
    patches, rows = [], []
    for text, sample in zip(texts, images, strict=True):
        first, *others = text.split("|SPEAKER|")
        row = first
        for image, other in zip(sample, others, strict=True):
            outputs = call.image_processor(image)
            [[pixels]] = outputs["images"]
            grid = torch.tensor(pixels).unfold(1, 8, 8).unfold(2, 8, 8).permute(1, 2, 3, 4, 0)
            [[height]] = outputs["image_unpadded_heights"]
            [[width]] = outputs["image_unpadded_widths"]
            n_rows, n_columns = (height + 7) // 8, (width + 7) // 8
            patches.append(grid[:n_rows, :n_columns].reshape(n_rows * n_columns, -1))
            row += ("|SPEAKER|" * n_columns + "|NEWLINE|") * n_rows + other
        rows.append(torch.tensor(tokenizer(row)["input_ids"]))
    masks = [torch.ones_like(row) for row in rows]
    padded = (pad_sequence(each, batch_first=True) for each in (rows, masks))
    inputs = dict(zip(("input_ids", "attention_mask"), padded, strict=True))
    return inputs | ({"pixel_values": torch.cat(patches)} if patches else {})


def _emu3_inputs(folder: Path, texts: Sequence[str], images: Sequence[Any]) -> dict[str, Any]:
    """Return texts with the codes that the class gives each image alone, which are tokens. In a
    batch with larger images, the class gives an image other codes."""
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForImageTextToText

    call = reference_processor("emu3", folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    rows = []
    for text, sample in zip(texts, images, strict=True):
        inputs = dict(call(text=[text], images=list(sample) or None, return_tensors="pt"))
        row = inputs["input_ids"][0, _TYPES["emu3"].n_before :]
        codes = []
        for image in sample:
            alone = call.image_processor(image, return_tensors="pt")
            codes.append(model.model.get_image_tokens(**alone))
        row[row == model.config.image_token_id] = torch.cat(codes).long() if codes else row[:0]
        rows.append(row)
    masks = [torch.ones_like(row) for row in rows]
    padded = (pad_sequence(each, batch_first=True) for each in (rows, masks))
    return dict(zip(("input_ids", "attention_mask"), padded, strict=True))

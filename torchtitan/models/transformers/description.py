"""Reads config.json: the class in transformers that computes a model, and its sizes."""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.hugging_face_keys import CLASSIFIER
from torchtitan.models.transformers.encoder_decoders import ENCODER_DECODERS, is_encoder_decoder
from torchtitan.tools.errors import UserError, in_words, suggest

_found = version("transformers") if importlib.util.find_spec("transformers") else "absent"
if not _found[:1].isdigit() or [int(number) for number in _found.split(".")[:2]] < [5, 23]:
    raise UserError(
        "this model is computed by its class in transformers 5.23 or newer, which is not "
        f"installed ({_found}): pip install 'torchtitan[transformers]', or EXTRA=transformers "
        "./run_train.sh"
    )

import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, PretrainedConfig  # noqa: E402
from transformers.dynamic_module_utils import get_class_from_dynamic_module  # noqa: E402
from transformers.integrations.heterogeneity.configuration_utils import (  # noqa: E402
    AmbiguousGlobalPerLayerAttributeError,
)
from transformers.models.auto import modeling_auto  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel
TRUST_VARIABLE = "TORCHTITAN_TRUST_REMOTE_CODE"
"""Environment variable that, set to 1, allows the code in models' folders to be executed."""

FOLDER_KEY = "_name_or_path"
"""Key of transformers for the folder of a config.json."""

_ABOUT_FILES = {"quantization_config", "transformers_version", "dtype", "torch_dtype"}
"""Keys of config.json about its files and the program that wrote them, not about the model."""

_ABOUT_ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Keys of older files, which every configuration reads into `rope_parameters`."""

_own_classes: dict[type[PretrainedConfig], type["PreTrainedModel"]] = {}
"""Class of a configuration → class of its models, both from code in models' folders."""

_read_configs: dict[str, PretrainedConfig] = {}
"""Text of a document → its configuration object, without code of models' folders, for the last
`_MOST_READ` documents."""

_MOST_READ = 16
"""More than the models of a run and their tiny clones."""


def model_classes() -> dict[str, list[str]]:
    """Return model_type → names of the classes that train here, the preferred one first, for every
    type that transformers knows."""
    names: dict[str, list[str]] = {}
    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"):
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            names.setdefault(model_type, []).extend([name] if isinstance(name, str) else name)
    return names


def type_of_architecture(document: Mapping[str, object]) -> str | None:
    """Return the model_type of the first class of transformers in a config.json's `architectures`
    if transformers does not know the file's own type, and no code in the folder may compute it."""
    architectures = document.get("architectures")
    if (
        document.get("model_type") in CONFIG_MAPPING
        or not isinstance(architectures, list)
        or _own_code(document)
    ):
        return None
    classes = {name for names in model_classes().values() for name in names}
    named = [name for name in map(str, architectures) if name in classes]
    return getattr(transformers, named[0]).config_class.model_type if named else None


def unknown_keys(document: Mapping[str, object]) -> list[str]:
    """Return the keys of a config.json that the configuration of its model_type does not have."""
    cls = CONFIG_MAPPING[str(document["model_type"])]
    known = cls().to_dict().keys() | cls.attribute_map.keys() | _ABOUT_FILES | _ABOUT_ROPE
    return sorted(document.keys() - known - {"auto_map", FOLDER_KEY})


def checked_document(document: Mapping[str, object]) -> dict[str, object]:
    """Return the part of a config.json that describes the model. Raise `UserError` if no class here
    computes it."""
    is_known = document.get("model_type") in model_classes()
    if not is_known and not _own_code(document):
        raise UserError(_refusal(document))
    left_out = _ABOUT_FILES | ({"auto_map", FOLDER_KEY} if is_known else set())
    kept = {key: value for key, value in document.items() if key not in left_out}
    # infinite numbers, which JSON does not have
    kept = PretrainedConfig._decode_special_floats(kept)
    try:
        config = transformers_config(kept)
    except Exception as error:  # validators of transformers raise various types
        raise UserError(f"config.json: transformers refuses it: {in_words(error)}") from error
    if config.is_encoder_decoder and not is_encoder_decoder(config):
        raise UserError(
            f"config.json: {config.model_type} is an encoder-decoder; only decoders train here, "
            f"and with images {', '.join(ENCODER_DECODERS)}"
        )
    _check_sections(kept, config)
    return kept


def _global_value(config: PretrainedConfig, name: str, default: object) -> object:
    """Return a value for all layers that do not differ in it, `default` without one."""
    try:
        return getattr(config, name, default)
    except AmbiguousGlobalPerLayerAttributeError:
        return default


def _check_sections(document: Mapping[str, object], config: PretrainedConfig) -> None:
    """Refuse sizes outside the section that a class reads: the class would take its defaults."""
    text = config.get_text_config(decoder=True)
    # The section may also be inside another one.
    sections = [name for name in config.sub_configs if getattr(config, name, None) is text]
    sections = sections or list(config.sub_configs)
    if text is config or any(name in document for name in sections):
        return
    own = {one.name for one in dataclasses.fields(config)}
    sizes = {
        key: value
        for key, value in document.items()
        if isinstance(value, int) and key not in own and not key.endswith("_token_id")
    }
    ignored = {
        key: value for key, value in sizes.items() if value != _global_value(text, key, value)
    }
    if ignored:
        raise UserError(
            f"config.json: {type(config).__name__} reads "
            f"{', '.join(f'{key} {value}' for key, value in ignored.items())} from a section "
            f"(such as text_config), but the file has none of {', '.join(sections)}"
        )


def _own_code(document: Mapping[str, object]) -> bool:
    """Return whether the code in the model's folder computes it, and may be executed."""
    code = ConfigReader("config.json", document).section("auto_map").values
    # else in another repository
    is_here = not any("--" in str(reference) for reference in code.values())
    return is_here and "AutoModelForCausalLM" in code and os.environ.get(TRUST_VARIABLE) == "1"


def _refusal(document: Mapping[str, object]) -> str:
    model_type, known = document.get("model_type"), model_classes()
    if code := ConfigReader("config.json", document).section("auto_map").values:
        files = sorted({f"{str(path).rpartition('.')[0]}.py" for path in code.values()})
        return (
            f"config.json: model_type '{model_type}' needs code in the model's folder "
            f"({', '.join(files)}), which is not executed; if you trust it, set the environment "
            f"variable {TRUST_VARIABLE}=1 (code of another repository, as in "
            "`repository--file.py`, is never executed)"
        )
    if model_type in CONFIG_MAPPING:
        return (
            f"config.json: model_type '{model_type}' has no class in transformers that predicts "
            "the next token"
        )
    wanted = document.get("transformers_version")
    newer = f" (the file was written by transformers {wanted})" if wanted else ""
    nearest = suggest(str(model_type), sorted(known), cutoff=0.8) or ";"
    return (
        f"config.json: model_type is {model_type!r}, which neither a family here nor transformers "
        f"{transformers.__version__} knows{newer}{nearest} --module PATH names a family of your own"
    )


def transformers_config(
    document: Mapping[str, object], vocab_size: int | None = None
) -> PretrainedConfig:
    """Return transformers' configuration object for a `checked_document`, with another vocabulary
    size. Raise `UserError` for code that may not be executed, since a checkpoint's `model.json` may
    hold any document."""
    if "auto_map" in document:
        if not _own_code(document):
            raise UserError(_refusal(document))
        code = ConfigReader("config.json", document).section("auto_map").values
        folder = str(document[FOLDER_KEY])
        cls: type[PretrainedConfig] = get_class_from_dynamic_module(str(code["AutoConfig"]), folder)
        model_class: type[PreTrainedModel] = get_class_from_dynamic_module(
            str(code["AutoModelForCausalLM"]), folder
        )
        _own_classes[cls] = model_class
        config: PretrainedConfig = cls.from_dict(copy.deepcopy(dict(document)))
    else:
        config = _known_config(document)
    for part in (config, config.get_text_config(decoder=True)):
        if vocab_size is not None and hasattr(part, "vocab_size"):
            part.vocab_size = vocab_size
    return config


def _known_config(document: Mapping[str, object]) -> PretrainedConfig:
    """Return a new configuration object of a type that transformers knows. It checks each value,
    and formats the whole for a log, so each document is read only once: a run needs it twenty
    times."""
    key = repr(document)
    if key not in _read_configs:
        cls = CONFIG_MAPPING[str(document["model_type"])]
        _read_configs[key] = cls.from_dict(copy.deepcopy(dict(document)))
        if len(_read_configs) > _MOST_READ:
            del _read_configs[next(iter(_read_configs))]  # the oldest
    return copy.deepcopy(_read_configs[key])


def class_of(config: PretrainedConfig) -> tuple[type["PreTrainedModel"], PretrainedConfig]:
    """Return the class for a transformers configuration, and the part of the configuration that
    describes it: the class that config.json names in `architectures` if it trains here, otherwise
    the class of its model_type."""
    if type(config) in _own_classes:
        return _own_classes[type(config)], config
    known = model_classes()[config.model_type]
    named = [name for name in config.architectures or () if name in known]
    if not named and CLASSIFIER in str(config.architectures):
        named = known[-1:]  # of the whole model, if there is another one of its language side
    cls = getattr(transformers, (named or known)[0])
    text = config.get_text_config(decoder=True)
    # the language side of a model of images and text
    return cls, text if cls.config_class is type(text) else config


def missing_kernels(config: PretrainedConfig) -> list[str]:
    """Return the packages whose kernels a class would use if they were installed."""
    source = inspect.getsource(inspect.getmodule(class_of(config)[0]))  # type: ignore[arg-type]
    packages = set(re.findall(r'_with_fallback\("\w+", "(\w+)"\)', source))
    return sorted(package for package in packages if importlib.util.find_spec(package) is None)


def forward_arguments(
    part: torch.nn.Module | type[torch.nn.Module],
) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `forward` of a class, or of one of its models, by name. Each new
    token of a generated text asks for them."""
    forward = part.forward
    return _parameters(getattr(forward, "__func__", forward))


@functools.lru_cache(maxsize=64)
def _parameters(forward: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(forward).parameters


def build_class(
    config: PretrainedConfig, implementation: str | dict[str, str] | None = None
) -> "PreTrainedModel":
    """Build the class for a transformers configuration in float32, with the attention
    `implementation`, if any: for all parts, or by the name of a part's configuration."""
    cls, config = class_of(config)
    options = {} if implementation is None else {"attn_implementation": implementation}
    try:  # with a copy, since it writes into its configuration
        model = cls._from_config(copy.deepcopy(config), dtype=torch.float32, **options)
    except Exception as error:  # impossible sizes raise various types
        raise UserError(
            f"config.json: {cls.__name__} cannot be built from it: {in_words(error)}"
        ) from error
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is not None and model.get_output_embeddings() is None:  # such as BLIP's
        model.get_output_embeddings = decoder.get_output_embeddings
    _drop_unread_experts(model)
    return model


def _drop_unread_experts(model: torch.nn.Module) -> None:
    """Drop what LongCat's class has, but nothing reads and published files do not have: rows of
    gate_up_proj for experts that return their input, a quarter of all parameters."""
    for experts in model.modules():
        if getattr(experts, "zero_expert_num", 0) and experts.gate_up_proj is not None:
            n_read = len(experts.get_parameter("down_proj"))
            read = experts.get_parameter("gate_up_proj").detach()[:n_read]
            experts.gate_up_proj = torch.nn.Parameter(read.clone())


def written_document(config: PretrainedConfig, class_name: str) -> dict[str, object]:
    """Return the config.json of a model that `class_name` reads, for a transformers
    configuration."""
    _, config = class_of(config)
    config.architectures = [class_name]
    written = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in written.items() if key not in _ABOUT_FILES}

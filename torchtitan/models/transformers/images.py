"""The parts of a class that read images, and its call for a batch with images."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin, runtime_checkable

import torch
from torch import Tensor, nn

from torchtitan.models.transformers.captions import ImageFeatures, reads_captions
from torchtitan.models.transformers.description import forward_arguments
from torchtitan.models.transformers.encoder_decoders import readers_of_text
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import OF_TOKENS, PLACES, TOKEN_TYPES, ImageInputs
from torchtitan.tools.device import send
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import tree_iter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


Part = Literal["language", "projector", "vision"]

_PROJECTORS = re.compile(
    r"(model\.(encoder\.)?|git\.)?("
    # a module next to the vision tower
    r"\w*(projector|projection|enc_to_dec_proj|connector|aligner|adapter|resampler|qformer)\w*(\.|$)|"
    r"(embed_vision|visual_embeddings_table|vision_embed_tokens|merger)\.|"
    r"(image_newline|view_separator|query_tokens)$|"
    # a module in the tower, after its layers
    r"\w+\.((?!vit_merger)\w*merger\w*|connector|downsample\w*|head_linear|head_norm|"
    r"vision_adapter)\."
    r")"
)
"""Names of the parameters between a vision tower and the language model, in the classes of
transformers. Some modules inside the tower's layers are also called projection."""

_TOWERS = re.compile(r"vision|vq")
"""Names of the parts of configurations that describe a vision tower."""

_LATEST = "image_attention_mask"

_OTHER_SENSES = re.compile(r"audio|speech|sound")
"""Names of the towers that images do not reach."""


@runtime_checkable
class ReadsImages(Protocol):
    """A module with the method of its class for the features of images."""

    def get_image_features(self, *args: object, **kwargs: object) -> ImageFeatures: ...


def is_language_model(config: "PretrainedConfig") -> bool:
    """Return whether a class's configuration describes a language model by itself."""
    return config.get_text_config(decoder=True) is config and not _tower_types(config)


def _tower_types(config: "PretrainedConfig") -> set[type]:
    """Return the types of a configuration's vision towers, without its language model's type."""
    text = config.get_text_config(decoder=True)
    names = filter(_TOWERS.search, config.sub_configs)
    parts = [getattr(config, name, None) for name in names]
    return {type(part) for part in parts if part is not None and type(part) is not type(text)}


def parts_of(model: "PreTrainedModel") -> dict[Part, list[nn.Parameter]]:
    """Return the parameters of a class by part; a language model by itself has one part."""
    if is_language_model(model.config):
        return {"language": list(model.parameters())}
    owners = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    owners += readers_of_text(model)
    language = _ids(owner for owner in owners if owner is not None)
    # The decoder of some classes contains the tower.
    towers = _tower_types(model.config)
    others = [one for one in model.modules() if type(_config_of(one)) in towers]
    if any(one in set(others) for one in model.get_decoder().modules()):
        others += [one for name, one in model.named_modules() if _PROJECTORS.fullmatch(name)]
    language -= _ids(others)
    parts: dict[Part, list[nn.Parameter]] = {"language": [], "projector": [], "vision": []}
    for name, parameter in model.named_parameters():
        if id(parameter) in language:
            parts["language"].append(parameter)
        elif _PROJECTORS.match(name):
            parts["projector"].append(parameter)
        else:
            parts["vision"].append(parameter)
    return parts


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _config_of(module: nn.Module) -> object:
    return getattr(module, "config", None)


def train_parts(model: "PreTrainedModel", trained: list[Part]) -> None:
    """Freeze the parameters of all other parts. Raise `UserError` if a part has none."""
    parts = parts_of(model)
    for name in trained:
        if not parts.get(name):
            raise UserError(
                f"--model.train {name}: {type(model).__name__} has no such part; it has: "
                + ", ".join(part for part, parameters in parts.items() if parameters)
            )
    for name, parameters in parts.items():
        for parameter in parameters:
            parameter.requires_grad_(name in trained)


def image_arguments(
    model: "PreTrainedModel", images: ImageInputs, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of a class for images, in `dtype`: the type of the weights that read
    them."""
    accepted = forward_arguments(model)
    tensors = images.tensors
    if not tensors and reads_latest_image(model):
        tensors = images.blank  # which no token reads
    arguments: dict[str, Tensor | list[int]] = {
        name: _as_taken(tensor, dtype, accepted[name].annotation if name in accepted else None)
        for name, tensor in tensors.items()
    }
    types = [name for name in accepted if name.endswith(OF_TOKENS)]
    if not arguments:
        arguments |= absent_images(model, images.token_types_BL)
    return arguments | {name: images.more_types.get(name, images.token_types_BL) for name in types}


def reads_latest_image(model: "PreTrainedModel") -> bool:
    """Return whether layers of a class read the latest image before each token, as in Idefics."""
    return _LATEST in forward_arguments(model)


def has_prefixes(cls: type["PreTrainedModel"], config: "PretrainedConfig") -> bool:
    """Return whether the prompts of a class, with tokens of type 0, see both ways, as in
    PaliGemma."""
    text = config.get_text_config(decoder=True)
    takes_types = TOKEN_TYPES in forward_arguments(cls)
    return takes_types and getattr(text, "use_bidirectional_attention", None) is True


def absent_images(model: "PreTrainedModel", tokens_BL: Tensor) -> dict[str, Tensor]:
    """Return the arguments for tokens without images of a class that always takes a mask of images,
    and features if it gets no pixels, or whose prompts see both ways: the tokens are those of
    answers. Nothing for other classes."""
    if has_prefixes(type(model), model.config):
        return {TOKEN_TYPES: torch.ones_like(tokens_BL)}
    text = model.config.get_text_config(decoder=True)
    if reads_latest_image(model):
        features = torch.zeros(len(tokens_BL), 1, 1, model.config.vision_config.embed_dim)
        mask_BL1 = torch.zeros_like(tokens_BL)[..., None]
        return {_LATEST: mask_BL1, "image_encoder_embeddings": features.to(tokens_BL.device)}
    places = [name for name in forward_arguments(model) if name.endswith(PLACES)]
    if not places:
        return {}
    features = torch.zeros(0, 1, text.hidden_size, device=tokens_BL.device)
    return {places[0]: torch.zeros_like(tokens_BL), "image_embeds": features}


def counted_positions(model: "PreTrainedModel", ids_BS: Tensor, mask_BS: Tensor) -> Tensor | None:
    """Return the positions that Kosmos's classes give whole texts: from the id of padding on, and
    without tokens of padding, which an answer may have. None for other classes."""
    if not any(name.endswith(PLACES) for name in forward_arguments(model)):
        return None
    padding_id = model.config.get_text_config(decoder=True).pad_token_id
    is_counted = (ids_BS != padding_id) * mask_BS
    return is_counted.cumsum(-1) * is_counted + padding_id


def feature_arguments(
    method: Callable[..., object], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor | list[int]]:
    """Return those tensors that a class's `get_image_features` takes, as `image_arguments` does."""
    accepted = inspect.signature(method).parameters
    return {
        name: _as_taken(tensor, dtype, accepted[name].annotation)
        for name, tensor in tensors.items()
        if name in accepted
    }


def _as_taken(tensor: Tensor, dtype: torch.dtype, annotation: object) -> Tensor | list[int]:
    """Return a tensor in `dtype` if it has floating point, and a list if a class takes lists of
    integers only, such as `list[int] | None`."""
    if tensor.is_floating_point():
        return tensor.to(dtype)
    is_union = isinstance(annotation, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    takes_lists = any(get_origin(kind) is list for kind in kinds)
    if takes_lists and Tensor not in kinds:
        numbers: list[int] = tensor.tolist()
        return numbers
    return tensor


def without_images(readers: Sequence[nn.Parameter], hidden_BLD: Tensor) -> Tensor:
    """Return hidden states that depend, with gradients of 0, on all trained parameters that read
    images."""
    for parameter in readers:
        if parameter.requires_grad:
            hidden_BLD = hidden_BLD + 0 * parameter.flatten()[0]
    return hidden_BLD


def feature_owner(model: nn.Module) -> ReadsImages | None:
    """Return the module whose `get_image_features` a class calls; None if it has none."""
    owners = (getattr(model, "model", None), model)
    return next((owner for owner in owners if isinstance(owner, ReadsImages)), None)


def is_projected(output: object) -> bool:
    """Return whether the results of a class's `get_image_features` have passed its projector;
    Llama 4's pass it later."""
    names = ("pooler_output", "deepstack_features")
    return any(getattr(output, name, None) is not None for name in names)


def features_in(output: ImageFeatures) -> list[Tensor]:
    """Return what a class uses of the results of its `get_image_features`. Some classes pair them
    with the numbers of layers."""
    pooled = getattr(output, "pooler_output", None)
    features = output.last_hidden_state if pooled is None else pooled
    used = [features, getattr(output, "deepstack_features", None)]
    return [one for one in tree_iter(used) if isinstance(one, Tensor)]


def join_image_experts(model: nn.Module) -> None:
    """Make each layer depend, with gradients of 0, on its experts for the tokens of images: ERNIE
    4.5's class skips them in a batch without images, and ranks must reduce the same gradients."""
    for module in model.modules():
        if hasattr(module, "vision_moe"):
            module.register_forward_hook(_with_image_experts)


def _with_image_experts(
    module: nn.Module, args: object, output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    states, router_logits = output
    experts = module.get_submodule("vision_moe")
    return without_images(list(experts.parameters()), states), router_logits


@contextlib.contextmanager
def reading_blank(
    model: "PreTrainedModel",
    images: ImageInputs,
    dtype: torch.dtype,
    projector: Callable[[], Sequence[nn.Parameter]],
) -> Iterator[None]:
    """Make a class read the blank image of a batch without images, and add its features times 0 to
    the embeddings: each rank must gather the same weights and reduce the same gradients.
    `projector` returns the parameters of the projector. Their gradients are 0 if features pass it
    after the class's method. The gradients of parts that images do not reach, such as Janus's parts
    for the images that it draws, stay None, as with images."""
    owner = feature_owner(model)
    assert owner is not None, "see `_reads_blank`"
    method = owner.get_image_features
    arguments = feature_arguments(method, images.blank, dtype)
    zeros: list[Tensor] = []

    def add_zero(module: nn.Module, args: object, embeddings: Tensor) -> Tensor | None:
        if zeros:  # some classes also embed the codes of an image
            return None
        zeros.append(embeddings.new_zeros(()))
        output = method(**arguments, return_dict=True)
        zeros[0] = sum((0 * tensor.sum() for tensor in features_in(output)), zeros[0])
        later = [] if is_projected(output) else projector()
        return without_images(later, embeddings + zeros[0].to(embeddings.dtype))

    hook = model.get_input_embeddings().register_forward_hook(add_zero)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def running_vision_once(model: "PreTrainedModel", layer: nn.Module) -> Iterator[None]:
    """Raise `UserError` if a class runs `layer`, the first of its vision tower, before its
    embedding or more than once in a forward pass: ranks with other images would wait for other
    weights."""
    calls: list[str] = []

    def before_embedding(*_: object) -> None:
        calls.append("embedding")

    def before_layer(*_: object) -> None:
        if calls != ["embedding"]:
            raise UserError(
                f"{type(model).__name__} runs its vision tower several times, or before its "
                "embedding, so that ranks with different images cannot share its layers; train it "
                "on one device"
            )
        calls.append("layer")

    embedding = model.get_input_embeddings()
    with contextlib.ExitStack() as hooks:
        for module, hook in ((embedding, before_embedding), (layer, before_layer)):
            hooks.callback(module.register_forward_pre_hook(hook, prepend=True).remove)
        yield


def vision_layers(model: "PreTrainedModel") -> list[str]:
    """Return the layers of a class's vision tower by name: the modules in its largest list, in
    forward order; empty without a list, or without a method for the features of images."""
    vision = {id(parameter) for parameter in parts_of(model).get("vision", [])}
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        is_vision = bool(parameters) and all(id(one) in vision for one in parameters)
        if not isinstance(module, nn.ModuleList) or not is_vision or _OTHER_SENSES.search(name):
            continue
        if all(type(one).forward is not nn.Module.forward for one in module):
            lists[name] = module
    if not lists or not (feature_owner(model) or reads_captions(model.config)):
        return []
    largest = max(lists, key=lambda name: sum(one.numel() for one in lists[name].parameters()))
    return [f"{largest}.{index}" for index in range(len(lists[largest]))]


def places_of(model: "PreTrainedModel", *names: Part) -> list[tuple[nn.Module, str]]:
    """Return the owner and name of each parameter of parts. Sharding and mixed precision replace
    the parameters, but not their owners."""
    parts = parts_of(model)
    chosen = {id(parameter) for name in names for parameter in parts[name]}
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in chosen
    ]


def token_mask(tokens_BL: Tensor, attention: AttentionMetadata | None) -> Tensor:
    """Return a mask that is 0 in the padding of rows, int64; a row without tokens keeps one."""
    mask_BL = torch.ones_like(tokens_BL)
    if attention is None or attention.n_tokens_B is None:
        return mask_BL
    n_tokens_B = send(attention.n_tokens_B.clamp(min=1), tokens_BL.device)
    places_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    return mask_BL * (places_L < n_tokens_B[:, None])

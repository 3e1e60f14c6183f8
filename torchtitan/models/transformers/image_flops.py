"""Counts the operations of a class's vision tower and projector for the images of a batch, and runs
both without memory."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.transformers.captions import ImageFeatures, tower_of
from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.image_codes import encode_each_image
from torchtitan.models.transformers.images import (
    feature_arguments,
    feature_owner,
    features_in,
    parts_of,
)
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import (
    OpOverload,
    TorchDispatchMode,
    flop_formulas,
    fused_attention,
    reading_operation,
    tree_iter,
    tree_map,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_MOST_COUNTS = 4096
"""Batches of other sizes whose counts are kept."""


class _MetaIfMixed(TorchDispatchMode):
    """Computes without memory what depends on weights, which are on the meta device, and for real
    what depends on sizes only: towers read them."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            if func is reading_operation():  # such as whether a mask hides anything
                return False
            if func is torch.ops.aten.index.Tensor:
                x, indices = args
                assert isinstance(indices, list)
                args = (x, _places(indices))
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        if tensors and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta" if any(x.is_meta for x in tensors) else "cpu"}
        return func(*args, **kwargs)


def _places(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Return indices with the places of masks with values, since a mask without has no count."""
    places: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool and not index.is_meta
        places += index.nonzero(as_tuple=True) if index is not None and is_mask else [index]
    return places


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _fusing_attention() -> Iterator[None]:
    """Compute attention by one operation, which keeps no weights, as on a GPU, unless its mask is
    trained. A `TorchFunctionMode` would not reach layers that a backward pass recomputes
    (`findings/torch_function_modes_miss_recomputation.sh`)."""
    plain: Callable[..., Tensor] = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: object,
        **options: object,
    ) -> Tensor:
        is_trained = attn_mask is not None and attn_mask.requires_grad
        compute = plain if is_trained else _fused_attention
        return compute(query, key, value, attn_mask, *args, **options)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = plain


def _fused_attention(
    q_BHLD: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    attn_mask: Tensor | None = None,
    *_: object,
    **__: object,
) -> Tensor:
    n_repeats = q_BHLD.shape[1] // k_BKMD.shape[1]
    keys, values = (x.repeat_interleave(n_repeats, 1) for x in (k_BKMD, v_BKMD))
    result: Tensor = fused_attention()(q_BHLD, keys, values, attn_mask=attn_mask)[0]
    return result


def _features(model: "PreTrainedModel") -> Callable[..., ImageFeatures]:
    """Return the method of a class for the features of images. Raise `NotImplementedError` if it
    has none."""
    owner = feature_owner(model)
    if owner is None and (tower := tower_of(model)) is not None:
        return tower
    if owner is None:
        raise NotImplementedError(f"{type(model).__name__} has no method for features of images")
    return owner.get_image_features


def trace_images(model: "PreTrainedModel", images: ImageInputs, dtype: torch.dtype) -> None:
    """Run a class's vision tower and projector, and their backward pass, on the meta device, where
    the weights are, in `dtype`: for the observers of operations.

    Raises:
        RuntimeError, NotImplementedError: the class reads values that weights decide.
    """
    method = _features(model)
    arguments = feature_arguments(method, images.tensors, dtype)
    with _fusing_attention(), _MetaIfMixed():
        output = method(**arguments, return_dict=True)
        trained = [one for one in features_in(output) if one.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.empty_like(one) for one in trained])


class ImageFlops:
    """Operations of a class's vision tower and projector: matrix products and convolutions, in
    attention over the whole square of the tokens that the class computes together.

    Args:
        config: transformers' configuration of the class.
    """

    def __init__(self, config: "PretrainedConfig"):
        self._config = config
        self._plain: PreTrainedModel | None = None
        self._is_told = False
        self._counts: dict[tuple[object, ...], float] = {}

    def of(self, model: "PreTrainedModel", images: ImageInputs) -> float:
        """Return the operations, forward and backward, of a pass of `model` over images on the
        host. Nothing before the first trained part has a backward pass, which takes twice the
        operations of the forward pass (Kaplan et al. 2020, arXiv:2001.08361, 2.1)."""
        if not images.tensors:
            return 0.0
        parts = parts_of(model)
        is_vision_trained = any(weight.requires_grad for weight in parts["vision"])
        forward = self._forward(images)
        if is_vision_trained:
            return 3 * forward
        trained = (weight for weight in parts["projector"] if weight.requires_grad)
        tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        matrices = (one for one in trained if one.ndim > 1 and id(one) not in tables)
        return forward + 4.0 * sum(one.numel() for one in matrices) * images.n_tokens

    def _forward(self, images: ImageInputs) -> float:
        key = tuple((name, _sizes(name, images.tensors[name])) for name in sorted(images.tensors))
        if key not in self._counts:
            if len(self._counts) == _MOST_COUNTS:
                self._counts.clear()
            self._counts[key] = self._count(images.tensors)
        return self._counts[key]

    def _count(self, tensors: Mapping[str, Tensor]) -> float:
        if self._plain is None:
            with torch.device("meta"):
                self._plain = build_class(self._config, "eager").eval().requires_grad_(False)
            encode_each_image(self._plain)
            flop_formulas()
        try:
            method = _features(self._plain)
            arguments = feature_arguments(method, tensors, torch.float32)
            with torch.no_grad(), FlopCounterMode(display=False) as counter, _MetaIfMixed():
                method(**arguments, return_dict=True)
            return float(counter.get_total_flops())
        except (RuntimeError, NotImplementedError) as error:
            if not self._is_told:
                self._is_told = True
                reason = str(error).split("\n")[0]
                logger.warning("operations of some images are not counted: %s", reason)
            return 0.0


def _sizes(name: str, tensor: Tensor) -> object:
    """Return what the operations depend on: the shape of pixels and prompts, and the values of
    sizes."""
    is_content = tensor.is_floating_point() or tensor.numel() > 4096 or name.startswith("qformer_")
    return tuple(tensor.shape) if is_content else tuple(tensor.flatten().tolist())

"""Interfaces of models (`BaseModel`) and of modules that converters insert (`ConvertedModule`)."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.images import ImageInputs
from torchtitan.protocols.initializer import DerivedRows, initializers_of
from torchtitan.tools.errors import UserError


class BaseModel(nn.Module, Configurable):
    """A model that the trainer can train.

    `config.build()` constructs it; under `torch.device("meta")`, it takes no memory. Every module
    that owns parameters carries their initial distributions (`torchtitan.protocols.initializer`).
    For the forward pass `forward(tokens, attention=None, *, head=…, **head_inputs)`, see
    `torchtitan.models.common.decoder.Decoder`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Fields that the trainer reads for every family."""

        dim: int
        """Width of the residual stream, the hidden states between layers."""

        vocab_size: int | None = None
        """Rows of the embedding and of the output head. None: the size of the tokenizer."""

        max_seq_len: int = 8192
        """Context of the published model in tokens; a longer training.seq_len only warns."""

        scores: bool = False
        """Compute one score per token, a reward, instead of logits (`--module reward`)."""

        @builds(lambda: BaseModel)
        def build(self) -> object:
            """Build the model on the current device."""

        @property
        def layer_kinds(self) -> list[object]:
            """The kind of each layer; layers that take another time or memory have another kind."""
            return [None] * getattr(self, "n_layers", 0)

        def with_layers(self, n_layers: int) -> Self:
            """Return the configuration of a model that consists of the first layers of this one.
            Raise `UserError` without repeated layers."""
            if not hasattr(self, "n_layers"):
                raise UserError(f"{type(self).__qualname__} has no n_layers")
            return replace(self, n_layers=n_layers)  # type: ignore[call-arg]

        def check_training(self) -> None:
            """Raise `UserError` if the model can be computed, but not trained."""

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            """Sizes that tensor parallelism splits, by field; its degree must divide each of
            them."""
            return {}

        @property
        def context_parallel_sizes(self) -> dict[str, int]:
            """Sizes of recurrences, by field, that context-parallel ranks divide; the product of
            the degrees of tensor and context parallelism must divide each of them."""
            return {}

        @property
        def expert_parallel_sizes(self) -> dict[str, int]:
            """Number of routed experts of a layer and their width, by field; empty without routed
            experts."""
            return {}

        @property
        def divides_samples(self) -> bool:
            """True if the model gets whole samples, such as images, and divides their tokens among
            ranks itself (`OwnTokens`)."""
            return False

        def unsupported_parallelisms(self) -> dict[str, str]:
            """Return the degrees of `--parallelism` that must be 1 for this model, each with the
            reason."""
            return {}

        def pipeline_modules(self) -> list[str]:
            """Return the names, in order, of the modules that a pipeline can separate. Raise
            `UserError` if the model cannot be split."""
            raise UserError(
                f"{type(self).__qualname__} does not support pipeline parallelism "
                "(pipeline_modules)"
            )

        @property
        def shared_modules(self) -> list[str]:
            """Names of the first pipeline stage's modules that the last stage uses too, such as a
            tied embedding. Each of the two stages has a copy, with the same weights and the sum of
            both gradients."""
            return []

        def validate(self) -> None:
            """Raise `UserError` for an impossible combination of sizes."""

    unused_layers: Collection[str] = ()
    """Names of modules without trained parameters of their own, such as a frozen vision tower's,
    which are not converted."""

    splits_sequences: ClassVar[bool] = True
    """True if tensor parallelism splits sequences over ranks between layers, so that their length
    must be a multiple of its degree."""

    def __init__(self, config: "BaseModel.Config"):
        nn.Module.__init__(self)
        Configurable.__init__(self, config)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the repeated blocks by name, in forward order. Each is compiled, and recomputed in
        the backward pass, by itself; the name ends with the layer's number."""
        raise NotImplementedError

    def stacked_experts(self) -> list[StackedExperts]:
        """Return the routed experts of all layers, which expert parallelism divides."""
        return [module for module in self.modules() if isinstance(module, StackedExperts)]

    def expert_matrices(self) -> list[tuple[nn.Module, Collection[str]]]:
        """Return the modules of routed experts with the names of their matrices, which are held in
        the type of products if they are frozen."""
        return [(experts, experts.matrices) for experts in self.stacked_experts()]

    def units(self) -> list[nn.Module]:
        """Return the modules, in forward order, whose weights data parallelism gathers together;
        the last belongs to the head, if any. The model itself is the unit of all other weights."""
        raise NotImplementedError

    def values_of(self, names: Sequence[str], seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the initial values of whole parameters and buffers without initializers
        (`protocols.initializer`), by name, in CPU memory. Raise `LookupError` for names without
        values."""
        raise LookupError(
            f"{', '.join(names)} of {type(self).__name__} have no initializer; attach one with "
            "torchtitan.protocols.initializer.with_initializers"
        )

    def keep_modules(self, names: Collection[str]) -> None:
        """Become a pipeline stage with the named modules, in place: other layers in a `ModuleDict`
        are dropped, and other modules with parameters become None."""
        for name, child in list(self.named_children()):
            if isinstance(child, nn.ModuleDict):
                for key in list(child):
                    if f"{name}.{key}" not in names:
                        del child[key]
            elif name not in names and any(True for _ in child.parameters()):
                setattr(self, name, None)

    def num_parameters(self) -> int:
        """Return the number of parameters, counting shared parameters once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def cache_boundaries(self) -> frozenset[int]:
        """Return the text lengths beyond which the keys of all tokens change, so that a key/value
        cache must be recomputed."""
        return frozenset()

    def generation_cache(self, make_default: Callable[[], object]) -> Any:
        """Return a cache for generation with the interface of `components.generation.KVCache`,
        which `make_default` makes: it keeps the keys and values of attention modules. None: the
        model cannot continue a text without its beginning."""
        return make_default()

    def flops_per_token(self, seq_len: int) -> float:
        """Return forward and backward operations per token in samples of `seq_len`; see
        `count_elements`."""
        raise NotImplementedError

    def image_flops(self, images: ImageInputs) -> float:
        """Return forward and backward operations for the images of a batch, besides those for their
        tokens in the language model."""
        return 0.0

    def image_readers(self) -> list[nn.Parameter]:
        """Return the present parameters that read images, before the language model."""
        return []

    def trace_images(self, images: ImageInputs) -> None:
        """Run the parts of a model on the meta device that read images, and their backward pass, so
        that observers of operations see them. A model that reads none does nothing.

        Raises:
            RuntimeError, NotImplementedError: the model reads values that weights decide.
        """


class AbsentModule(nn.Module):
    """Base class of what takes the place of a module in pipeline stages that do not have it, where
    None would fail."""


class SmallModel(BaseModel):
    """A model of a few linear layers without repeated blocks, such as a head: one unit of data
    parallelism."""

    def blocks(self) -> dict[str, nn.Module]:
        return {}

    def units(self) -> list[nn.Module]:
        return []

    def flops_per_token(self, seq_len: int) -> float:
        return 6.0 * self.num_parameters()


class ConvertedModule(nn.Module):
    """Replacement of a plain module, with its weights in another form or with additional weights.

    A mixin before the plain module's class. Checkpoints of the plain model can be loaded, and the
    plain model can be restored. Each parameter is one of the plain module's, with the same name; or
    derived from one (`derived`); or additional (`added`).
    """

    @property
    def derived(self) -> Mapping[str, DerivedRows]:
        """Name of a parameter → its derivation from one of the plain module's."""
        starts = initializers_of(self).items()
        return {name: start for name, start in starts if isinstance(start, DerivedRows)}

    @property
    def added(self) -> Collection[str]:
        """Names of the additional parameters, which have separate initial values."""
        return ()

    @abstractmethod
    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the plain module's parameters by name, computed from this module's unsharded ones.
        This also works on the meta device. Types may be more precise than `plain_types`."""

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        """Return the default types for writing the plain module's parameters, by name."""
        return {name: tensor.dtype for name, tensor in self.plain_state(own).items()}

    @abstractmethod
    def effective_weight(self) -> Tensor:
        """Return the effective weights as one differentiable tensor, for layers whose weights
        others read (a head)."""


def effective_weight(module: nn.Module) -> Tensor:
    """Return the effective weights of a module, converted or not."""
    if isinstance(module, ConvertedModule):
        return module.effective_weight()
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def converted_modules(model: nn.Module) -> Iterator[tuple[str, ConvertedModule]]:
    """Yield the converted modules of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, ConvertedModule):
            yield name, module


def count_elements(module: nn.Module) -> Iterator[tuple[float, bool]]:
    """Yield size and trainability of each parameter used in computation, in order of registration.
    A `ConvertedModule` has the plain module's parameters, and additional trained ones. With an
    `active_fraction`, only that part of a module's parameters multiplies each token."""
    for part in module.modules():
        fraction = getattr(part, "active_fraction", 1)
        own = dict(part.named_parameters(recurse=False))
        trained = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        plain: Mapping[str, Tensor] = own
        if isinstance(part, ConvertedModule):
            plain = part.plain_state(
                {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
            )
        yield from (
            (tensor.numel() * fraction, False)
            for name, tensor in plain.items()
            if name not in trained
        )
        yield from ((parameter.numel() * fraction, True) for parameter in trained.values())

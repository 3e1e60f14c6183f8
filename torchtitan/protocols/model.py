"""What the trainer asks of a model, `BaseModel`, and of the modules that converters put into one, `ConvertedModule`."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.config import Configurable
from torchtitan.protocols.initializer import DerivedRows
from torchtitan.tools.errors import UserError


class BaseModel(nn.Module, Configurable):
    """A model that the trainer can train.

    `config.build()` constructs it; under `torch.device("meta")` that allocates nothing. Every module that owns
    parameters carries their initial distributions (`torchtitan.protocols.initializer`). The forward pass is
    `forward(tokens, positions=None, *, head=…, **head_inputs)`, see `torchtitan.models.common.decoder.Decoder`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Fields that the trainer reads whatever the family."""

        dim: int
        """Width of the residual stream, the hidden states between layers."""

        vocab_size: int | None = None
        """Rows of the embedding and of the output head. None: as many as the tokenizer has."""

        max_seq_len: int = 8192
        """Tokens that the published model was trained to attend over; a longer training.seq_len only warns."""

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            """The sizes that tensor parallelism splits, by field; its degree must divide each of them."""
            return {}

        def pipeline_modules(self) -> list[list[str]]:
            """Names of the model's parts in the order of the forward pass; a pipeline is cut between the inner lists.
            Raises `UserError` if it cannot be cut."""
            raise UserError(f"{type(self).__qualname__} does not say where a pipeline can cut it")

        def validate(self) -> None:
            """Raise `UserError` for a combination of sizes that cannot be built."""

    def __init__(self, config: "BaseModel.Config"):
        nn.Module.__init__(self)
        Configurable.__init__(self, config)

    def num_parameters(self) -> int:
        """Parameters of the model, each counted once, however often it is used."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward for one token of a sample of `seq_len` tokens, of a model
        that may be converted and partly frozen: see `count_elements`."""
        raise NotImplementedError


class ConvertedModule(nn.Module):
    """Holds a plain module's weights in another form, or with others beside them.

    A converter puts it in the plain module's place. Checkpoints of the plain model can be loaded into it, and the plain
    model can be made of it, by what it says here. Mixed in before the class of the plain module.

    Its own parameters are of three kinds: those that the plain module has too, under the same names; those that follow
    from the plain module's (`derived`); and those that the plain module has nothing of (`added`).
    """

    @property
    def derived(self) -> Mapping[str, DerivedRows]:
        """Name of an own parameter → how it follows from one of the plain module's."""
        return {}

    @property
    def added(self) -> Collection[str]:
        """Names of the own parameters that begin with values of their own."""
        return ()

    @abstractmethod
    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the plain module's parameters by name; `plain_types` may be less precise. Works on meta tensors too.

        Args:
            own: this module's parameters by name, whole.
        """

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        """The types that the plain module's parameters are written in unless others are asked for, by name."""
        return {name: tensor.dtype for name, tensor in self.plain_state(own).items()}

    @abstractmethod
    def effective_weight(self) -> Tensor:
        """The weights that this module computes with as one tensor, with a gradient: for a layer whose weights are read
        instead of the layer called, as the loss reads an output head's."""


def effective_weight(module: nn.Module) -> Tensor:
    """The weights that `module` computes with, whether it has been converted or not."""
    if isinstance(module, ConvertedModule):
        return module.effective_weight()
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def converted_modules(model: nn.Module) -> Iterator[tuple[str, ConvertedModule]]:
    """The converted modules of a model with their names, as `named_modules` gives them."""
    for name, module in model.named_modules():
        if isinstance(module, ConvertedModule):
            yield name, module


def count_elements(module: nn.Module) -> Iterator[tuple[int, bool]]:
    """The elements of each parameter in `module` that is computed with, and whether it is trained, in the order in
    which they are registered. Of a `ConvertedModule` these are the plain module's, whatever form it keeps them in, and
    others that are trained."""
    for part in module.modules():
        own = dict(part.named_parameters(recurse=False))
        trained = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        plain: Mapping[str, Tensor] = own
        if isinstance(part, ConvertedModule):
            plain = part.plain_state({name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()})
        yield from ((tensor.numel(), False) for name, tensor in plain.items() if name not in trained)
        yield from ((parameter.numel(), True) for parameter in trained.values())

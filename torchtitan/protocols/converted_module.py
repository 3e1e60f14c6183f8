"""`ConvertedModule`: a module that holds a plain module's weights in another form, or with others beside them.

It is what a converter puts in a plain module's place. Checkpoints of the plain model can be loaded into it, and the
plain model can be made of it, by what it says of its parameters here; nothing else needs to know what it is.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from torchtitan.protocols.initializer import DerivedRows


class ConvertedModule(nn.Module):
    """Mixed in before the class of the plain module, which has the same name in the model.

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
        """The plain module's parameters by name, computed from this module's; `plain_types` may be less precise.

        Works on tensors of the meta device too, which is how shapes and types are found.

        Args:
            own: this module's parameters by name, whole.
        """

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        """The types that the plain module's parameters are written in where nobody asks for others, by name.

        Args:
            own: as of `plain_state`.
        """
        return {name: tensor.dtype for name, tensor in self.plain_state(own).items()}

    @abstractmethod
    def effective_weight(self) -> Tensor:
        """The weights that this module computes with as one tensor, with a gradient: for a layer whose weights are
        read rather than the layer called, as an output head's are by the loss."""


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

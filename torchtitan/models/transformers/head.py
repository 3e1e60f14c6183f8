"""The output layer of a class of transformers: its weights, apart from the class, so that the loss
reads them, and what takes its place in the class."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.protocols.model import effective_weight
from torchtitan.protocols.output_head import UNCHANGED, Head, LogitTransform, check_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def output_name(model: "PreTrainedModel") -> str:
    """Return the name of a class's output layer; "" without one."""
    output = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is output), "")


class OutputPlace(nn.Module):
    """Replaces a class's output layer, keeps the hidden states that the class passes to it, and
    returns one logit. If it `computes`, it returns all logits, with the embedding's weights, which
    stay shared when they are moved."""

    def __init__(self, model: "PreTrainedModel", *, computes: bool):
        super().__init__()
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self.weight = torch.empty(0)  # some classes read its type
        self.bias: nn.Parameter | None = None
        owner: nn.Module = self
        if output.weight is embedding.weight and output.bias is not None:
            others = (
                module for module in model.modules() if getattr(module, "bias", None) is output.bias
            )
            owner = next((module for module in others if module is not output), self)
            if owner is self:
                self.bias = output.bias
                with_initializers(self, bias=Constant(0.0))
        self._owners = embedding, owner
        self.computes = computes
        self.hidden: list[Tensor] = []

    def shared(self) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the embedding and the bias of an output layer that shares them."""
        embedding, owner = self._owners
        return effective_weight(embedding), _bias_of(owner)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        if self.computes:
            return F.linear(hidden_BLD, *self.shared())
        assert not self.hidden, "the class has one output layer"
        self.hidden.append(hidden_BLD)
        return hidden_BLD[..., :1].detach()


def _bias_of(module: nn.Module) -> Tensor | None:
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


class ClassHead(nn.Module):
    """Output weights, with the loss as their result in training. With tied embeddings, `output` is
    None."""

    def __init__(self, output: nn.Module | None, transform: LogitTransform):
        super().__init__()
        self.output = output
        self.transform = transform

    def forward(
        self,
        hidden_BLD: Tensor,
        tied: tuple[Tensor, Tensor | None] | None,
        head: Head,
        **head_inputs: object,
    ) -> Tensor:
        """Return `head(hidden states, output weights, …)`; `tied` are weights and bias of others,
        or None. A bias is one more column of weights."""
        if tied is None:
            assert self.output is not None
            tied = effective_weight(self.output), _bias_of(self.output)
        weight_VD, bias_V = tied
        if bias_V is not None:
            weight_VD = torch.cat((weight_VD, bias_V[:, None]), dim=1)
            hidden_BLD = torch.cat((hidden_BLD, torch.ones_like(hidden_BLD[..., :1])), dim=-1)
        check_scores(weight_VD, head)
        hidden_BLD = hidden_BLD.to(weight_VD.dtype)  # some classes compute the last norm in float32
        if isinstance(weight_VD, DTensor):
            hidden_BLD = DTensor.from_local(
                hidden_BLD, weight_VD.device_mesh, [Replicate()], run_check=False
            )
        if self.transform != UNCHANGED:
            head_inputs["transform"] = self.transform
        return head(hidden_BLD, weight_VD, **head_inputs)

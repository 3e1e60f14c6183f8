"""`TransformersModel`: a class of transformers with the interface of our models."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from tyro.conf import Suppress

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.transformers.description import build_class, checked_document, transformers_config
from torchtitan.models.transformers.flops import forward_flops, with_backward
from torchtitan.models.transformers.generation import ClassCache, NextTokens, has_cache
from torchtitan.models.transformers.initialize import add_initializers, class_values
from torchtitan.models.transformers.output import logit_transform
from torchtitan.models.transformers.packing import choose_packing
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.model import BaseModel, effective_weight
from torchtitan.protocols.output_head import UNCHANGED, Head, LogitTransform, compute_logits

_NO_LIMIT = 2**20
"""Context of a model whose configuration names none."""


class TransformersModel(BaseModel):
    """A class of transformers, in `model`, without its output weights, which are in `head`: the loss reads them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """A config.json; the sizes are those of the language model."""

        document: Suppress[dict[str, Any]]
        """Content of config.json."""

        @classmethod
        def of(cls, document: Mapping[str, Any]) -> Self:
            """Return the configuration for a config.json. Raise `UserError` as `checked_document`."""
            kept = checked_document(document)
            text = transformers_config(kept).get_text_config(decoder=True)
            return cls(
                dim=text.hidden_size,
                vocab_size=text.vocab_size,
                max_seq_len=getattr(text, "max_position_embeddings", None) or _NO_LIMIT,
                document=kept,
            )

        def transformers_config(self) -> Any:
            """Return transformers' configuration object."""
            return transformers_config(self.document, self.vocab_size)

        def unsupported_parallelisms(self) -> dict[str, str]:
            reason = "a class of transformers computes whole sequences, in one piece"
            return dict.fromkeys(("pipeline_parallel_degree", "context_parallel_degree"), reason)

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        described = config.transformers_config()
        self.packing = choose_packing(described)
        self.model = build_class(described, self.packing.implementation)
        add_initializers(self.model)
        self._freeze_other_modalities()
        self._block_names = _find_blocks(self.model)
        output = self.model.get_output_embeddings()
        embedding = self.model.get_input_embeddings()
        self.is_tied = output.weight is embedding.weight
        self.output_name = next(name for name, module in self.model.named_modules() if module is output)
        self.captured = CapturedInput()
        self.model.set_submodule(self.output_name, self.captured)
        self.head = ClassHead(None if self.is_tied else output, logit_transform(config.document))

    def _freeze_other_modalities(self) -> None:
        decoder, output = self.model.get_decoder(), self.model.get_output_embeddings()
        trained = {id(parameter) for part in (decoder, output) for parameter in part.parameters()}
        others = {name: p for name, p in self.model.named_parameters() if id(p) not in trained}
        for parameter in others.values():
            parameter.requires_grad_(False)

    def blocks(self) -> dict[str, nn.Module]:
        return {name: self.get_submodule(name) for name in self._block_names}

    def units(self) -> list[nn.Module]:
        embedding = [] if self.is_tied else [self.model.get_input_embeddings()]
        head = [] if self.is_tied else [self.head]
        return [*embedding, *self.blocks().values(), *head]

    def values_of(self, names: Sequence[str], seed: int) -> Iterator[tuple[str, Tensor]]:
        with torch.device("meta"):
            plain = self.config.build()
        yield from class_values(plain, names, seed)

    def generation_cache(self, make_default: Callable[[], Any]) -> ClassCache | None:
        return ClassCache() if has_cache(self.config.document, self.packing.implementation) else None

    def flops_per_token(self, seq_len: int) -> float:
        """Return operations per token, forward and backward: see `flops`."""
        with torch.device("meta"):
            plain = build_class(self.config.transformers_config(), "eager").eval()
        forward = forward_flops(plain, [name.removeprefix("model.") for name in self._block_names], seq_len)
        embedding = self.model.get_input_embeddings()
        tied = next(name for name, module in self.named_modules() if module is embedding)
        output, own = f"model.{self.output_name}.", tied if self.is_tied else "head.output"
        names = {name: f"model.{name}".replace(output, f"{own}.") if name else "" for name in forward}
        return with_backward({names[name]: flops for name, flops in forward.items()}, self)

    def forward(
        self,
        tokens_BL: Tensor,
        attention: AttentionMetadata | None = None,
        *,
        head: Head = compute_logits,
        **head_inputs: Any,
    ) -> Tensor:
        """Return logits (B, L, V), or the result of `head`; see `torchtitan.models.common.decoder.Decoder.forward`. A
        loss includes the auxiliary loss of routers, if the class gives one, weighted with the number of labels."""
        if isinstance(attention, NextTokens):
            outputs = attention.cache.run(self.model, tokens_BL, attention)
            hidden_BLD = self.captured.pop()[:, -tokens_BL.shape[1] :]
        else:
            outputs = self.packing.run(self.model, tokens_BL, attention, return_dict=True)
            hidden_BLD = self.packing.gather(self.captured.pop(), attention)
        tied_VD = effective_weight(self.model.get_input_embeddings()) if self.is_tied else None
        result = self.head(hidden_BLD, tied_VD, head, **head_inputs)
        auxiliary = getattr(outputs, "aux_loss", None)
        if isinstance(auxiliary, Tensor) and "labels_BL" in head_inputs:
            factor = self.model.config.get_text_config(decoder=True).router_aux_loss_coef
            result = result + factor * auxiliary * (head_inputs["labels_BL"] != IGNORE_INDEX).sum()
        return result


class CapturedInput(nn.Module):
    """Keeps the hidden states that a class passes to its output layer, in whose place it is, and returns one logit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)  # some classes read its type
        self._hidden_BLD: Tensor | None = None

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        assert self._hidden_BLD is None, "the class has one output layer"
        self._hidden_BLD = hidden_BLD
        return hidden_BLD[..., :1].detach()

    def pop(self) -> Tensor:
        """Return the hidden states, and forget them."""
        hidden_BLD, self._hidden_BLD = self._hidden_BLD, None
        assert hidden_BLD is not None
        return hidden_BLD


class ClassHead(nn.Module):
    """Output weights, with the loss as their result in training. With tied embeddings, `output` is None."""

    def __init__(self, output: nn.Linear | None, transform: LogitTransform):
        super().__init__()
        self.output = output
        self.transform = transform

    def forward(self, hidden_BLD: Tensor, tied_VD: Tensor | None, head: Head, **head_inputs: Any) -> Tensor:
        """Return `head(hidden states, output weights, …)`. A bias is one more column of weights."""
        weight_VD = tied_VD if self.output is None else effective_weight(self.output)
        assert weight_VD is not None
        bias_V = None if self.output is None else self.output.bias
        if bias_V is not None:
            weight_VD = torch.cat((weight_VD, bias_V[:, None]), dim=1)
            hidden_BLD = torch.cat((hidden_BLD, torch.ones_like(hidden_BLD[..., :1])), dim=-1)
        hidden_BLD = hidden_BLD.to(weight_VD.dtype)  # some classes compute the last norm in float32
        if self.transform != UNCHANGED:
            head_inputs["transform"] = self.transform
        return head(hidden_BLD, weight_VD, **head_inputs)


def _find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the modules that the class does not let others split, numbered and outermost."""
    names: list[str] = []
    unsplittable = set(getattr(model, "_no_split_modules", None) or ())
    for name, module in model.named_modules():
        is_block = type(module).__name__ in unsplittable and re.search(r"\.\d+$", name)
        if is_block and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return [f"model.{name}" for name in names]

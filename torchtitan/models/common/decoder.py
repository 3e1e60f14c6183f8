"""The decoder-only language model that families specialise: embedding, blocks, final norm, output head."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.attention import AttentionMask, CausalMask
from torchtitan.models.common.block import BlockDesign, TransformerBlock
from torchtitan.models.common.layers import RMSNorm
from torchtitan.models.common.rope import RoPEConfig, rope_cos_sin
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.model import BaseModel, count_elements, effective_weight
from torchtitan.tools.errors import UserError

_MOST = {
    **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size"), 2**24),
    **{"n_layers": 2_000, "max_seq_len": 2**32},
}
"""The largest sizes, far above the sizes of any model: a larger one is a mistake, or meant to fill up the memory."""

_MOST_PARAMETERS = 2**44

Head = Callable[..., Tensor]
"""What is computed from the last hidden states (B, L, D) and the output weights (V, D): logits, or the loss itself.
What it needs beside them is given to the model by name, and handed on to it."""


class Decoder(BaseModel):
    """Token embedding → blocks → norm → head. A family gives the `design` of its blocks, or makes its own in
    `make_block`.

    With tied embeddings there is no separate output weight: `output` is None and the head uses the embedding's.

    A pipeline stage is such a model with parts of it taken out: without `tok_embeddings` it takes hidden states rather
    than tokens, without `norm` and `output` it gives them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Sizes that all decoders share."""

        n_layers: int
        """Transformer blocks."""

        n_heads: int
        """Query heads."""

        n_kv_heads: int
        """Key/value heads; divides n_heads."""

        head_dim: int | None = None
        """Width of one head, even. None: dim / n_heads."""

        ffn_dim: int
        """Width of the feed-forward network."""

        norm_eps: float = 1e-5
        """Added to the mean square in RMSNorm."""

        tie_embeddings: bool = False
        """Use the embedding matrix as output weights too."""

        rope: RoPEConfig
        """Rotary position embedding."""

        @property
        def resolved_head_dim(self) -> int:
            """Width of one head, as given or as it follows from `dim`."""
            return self.dim // self.n_heads if self.head_dim is None else self.head_dim

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            """Heads and features, which tensor-parallel ranks share evenly."""
            return {name: getattr(self, name) for name in ("n_heads", "n_kv_heads", "ffn_dim")}

        def pipeline_modules(self) -> list[list[str]]:
            """Embedding, layers, norm and head: a stage is a piece of this row.

            Raises:
                UserError: with tied embeddings, whose weights would be in the first stage and in the last.
            """
            if self.tie_embeddings:
                raise UserError(
                    "pipeline parallelism cannot split a model with tied embeddings: its first and its last stage "
                    "would need the same weights (--model.no_tie_embeddings unties them, for training from scratch)"
                )
            layers = [[f"layers.{index}"] for index in range(self.n_layers)]
            return [["tok_embeddings"], *layers, ["norm", "output"]]

        def validate(self) -> None:
            """Raise `UserError` for sizes that do not fit together."""
            for name, most in _MOST.items():
                size = getattr(self, name)
                if not (size is None or 1 <= size <= most):
                    raise UserError(f"--model.{name} is {size}, and must be from 1 to {most}")
            if not 0 < self.norm_eps < math.inf:
                raise UserError(f"--model.norm_eps is {self.norm_eps}, and must be above 0")
            if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
                raise UserError(f"--model.head_dim is {self.head_dim}, and must be even and at least 2")
            if self.head_dim is None and (self.dim % self.n_heads or self.resolved_head_dim % 2):
                raise UserError(
                    f"--model.dim {self.dim} must give each of --model.n_heads {self.n_heads} an even width"
                )
            if self.n_heads % self.n_kv_heads:
                raise UserError(f"--model.n_kv_heads {self.n_kv_heads} must divide --model.n_heads {self.n_heads}")
            matrices = self.resolved_head_dim * 2 * (self.n_heads + self.n_kv_heads) + 3 * self.ffn_dim
            n_parameters = self.dim * (self.n_layers * matrices + 2 * (self.vocab_size or 0))
            if n_parameters > _MOST_PARAMETERS:
                raise UserError(
                    f"--model.dim {self.dim}, n_layers {self.n_layers}, n_heads {self.n_heads}, ffn_dim {self.ffn_dim} "
                    f"and vocab_size {self.vocab_size} make a model of {n_parameters:.1e} parameters, and "
                    f"{_MOST_PARAMETERS:.1e} are the most"
                )
            self.rope.validate()

    config: Config

    design: ClassVar[BlockDesign] = BlockDesign()
    """Differences of the blocks from Llama's."""

    def __init__(self, config: Config):
        super().__init__(config)
        if config.vocab_size is None:
            raise UserError(
                "model.vocab_size is None: set it before the model is built, as in config.vocab_size = "
                "tokenizer.vocab_size (the Trainer takes it from its tokenizer)"
            )
        init = with_initializers
        self.tok_embeddings: nn.Embedding | None = init(
            nn.Embedding(config.vocab_size, config.dim), weight=self.embedding_init()
        )
        # A dictionary, not a list: a pipeline stage drops layers, and those that stay keep their names.
        self.layers = nn.ModuleDict({str(index): self.make_block(index) for index in range(config.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.dim, config.norm_eps)
        self.output: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output = init(nn.Linear(config.dim, config.vocab_size, bias=False), weight=self.output_init())
        self.mask = CausalMask()

    def make_block(self, index: int) -> nn.Module:
        """Return the block of a layer: `block(hidden_BLD, rope, mask) -> hidden_BLD`."""
        return TransformerBlock(self.config, index, self.design)

    def output_init(self) -> TruncatedNormal:
        """Initial distribution of separate output weights: logits of standard deviation 1/4 whatever the width, so
        that the first loss is close to the logarithm of the vocabulary size."""
        return TruncatedNormal(self.config.dim**-0.5 / 4)

    def embedding_init(self) -> TruncatedNormal:
        """Initial distribution of the embedding: unit variance; if it serves as output weights too, logits of unit
        variance instead."""
        return TruncatedNormal(self.config.dim**-0.5 if self.config.tie_embeddings else 1.0)

    def forward(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor | None = None,
        *,
        packed: bool = True,
        head: Head = F.linear,
        **head_inputs: Any,
    ) -> Tensor:
        """Logits (B, L, V), or whatever `head` computes from the last hidden states and the output weights.

        A loss that is given as `head` need never hold all logits at once.

        Args:
            tokens_BL: token ids; of a pipeline stage other than the first, hidden states (B, L, D).
            positions_BL: each token's position within its document, starting at 0 with every document; tokens attend
                to the earlier ones of their document only. None: every sample is one document.
            packed: whether positions may start again within a sample; without it, attention is simply causal.
            head: called with hidden states, output weights and `head_inputs`.
        """
        mask: AttentionMask = self.mask(positions_BL if packed else None)
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[None]
        rope = rope_cos_sin(self.config.rope, self.config.resolved_head_dim, positions_BL)
        hidden_BLD = tokens_BL if self.tok_embeddings is None else self.tok_embeddings(tokens_BL)
        for block in self.layers.values():
            hidden_BLD = block(hidden_BLD, rope, mask)
        if self.norm is None:
            return hidden_BLD
        return head(self.norm(hidden_BLD), self.output_weight, **head_inputs)

    @property
    def output_weight(self) -> Tensor:
        """The output weights (V, D): the head's own, or the embedding's where they are tied."""
        holder = self.tok_embeddings if self.output is None else self.output
        assert holder is not None, "the stage with the norm has the output weights too"
        return effective_weight(holder)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, after appendix B of PaLM (arXiv:2204.02311): `6 N + 12 L H Q T`.

        N counts the parameters that multiply every token: all but an embedding that is only looked up; a tied one is
        the output head's, and counted. The attention term (L layers, H heads of width Q, T = seq_len) is the two
        products with scores, of 2 H Q T operations each forward and twice that backward; by that convention it is not
        halved for the causal mask, nor reduced for packed documents.

        Of the 6 operations, 2 are the forward pass, 2 the parameter's own gradient, which a frozen one has not, and 2
        the gradient of what it multiplies. The backward pass ends at the first trained parameter: nothing before it
        has a gradient, and attention takes 4 H Q T in layers before that parameter's. Within a layer, parameters are
        taken to compute one after another, in the order in which they are registered.
        """
        assert self.tok_embeddings is not None, "asked of a whole model, not of a pipeline stage"
        config = self.config
        scores = 4 * config.n_heads * config.resolved_head_dim * seq_len
        behind = [module for module in self.children() if module not in (self.tok_embeddings, self.layers)]
        head = [self.tok_embeddings] if self.output is None else []
        parts = [*((layer, scores) for layer in self.layers.values()), *((module, 0) for module in (*behind, *head))]
        has_gradient = any(parameter.requires_grad for parameter in self.tok_embeddings.parameters())
        flops = 0.0
        for module, attention in parts:
            for n_elements, is_trained in count_elements(module):
                flops += 2 * n_elements * (1 + is_trained + has_gradient)
                has_gradient |= is_trained
            flops += attention * (3 if has_gradient else 1)
        return flops

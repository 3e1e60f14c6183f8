"""The decoder-only language model that families specialize, its blocks, and its sharding plan."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.attention import GroupedQueryAttention, with_kernel
from torchtitan.models.common.layers import RMSNorm, SwiGLU
from torchtitan.models.common.rope import RoPEConfig, rope_cos_sin
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.model import BaseModel, count_elements, effective_weight
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.errors import UserError

_MOST = {
    **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size"), 2**24),
    **{"n_layers": 2_000, "max_seq_len": 2**32},
}
"""Maximum sizes, far above any real model's: a larger one is a mistake, or an attack on memory."""

_MOST_PARAMETERS = 2**44

Head = Callable[..., Tensor]
"""Computes logits or the loss from hidden states (B, L, D), output weights (V, D) and named inputs."""

_INIT_STD = 0.02

DENSE_SHARDING = ShardingPlan(
    tensor={
        "tok_embeddings": "vocabulary",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention": "whole sequence",
        "layers.*.attention.wq": "columns",
        "layers.*.attention.wk": "columns",
        "layers.*.attention.wv": "columns",
        "layers.*.attention.q_norm": "heads",
        "layers.*.attention.k_norm": "heads",
        "layers.*.attention.wo": "rows",
        "layers.*.ffn_norm": "sequence",
        "layers.*.feed_forward": "whole sequence",
        "layers.*.feed_forward.w1": "columns",
        "layers.*.feed_forward.w3": "columns",
        "layers.*.feed_forward.w2": "rows",
        "head.norm": "sequence",
        "head.output": "columns",
    },
    attention="layers.*.attention.attend",
)
"""Plan for every `Decoder` of `TransformerBlock`s. Parts that a model leaves out are None in the model."""


@dataclass(frozen=True, kw_only=True)
class BlockDesign:
    """Differences of a family's blocks from Llama's; the sizes are in `Decoder.Config`."""

    qk_norm: bool = False
    """RMS-normalize each head of queries and keys before RoPE, with weights shared by a layer's heads."""


class Decoder(BaseModel):
    """Token embedding → blocks → head. A family sets `design` or overrides `make_block`. A pipeline stage lacks parts:
    all but the first take hidden states, and without `head`, it returns them."""

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
            """Width of one head, as given or from `dim`."""
            return self.dim // self.n_heads if self.head_dim is None else self.head_dim

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            return {name: getattr(self, name) for name in ("n_heads", "n_kv_heads", "ffn_dim")}

        def pipeline_modules(self) -> list[str]:
            return ["tok_embeddings", *(f"layers.{index}" for index in range(self.n_layers)), "head"]

        @property
        def shared_modules(self) -> list[str]:
            return ["tok_embeddings"] if self.tie_embeddings else []

        def validate(self) -> None:
            for name, most in _MOST.items():
                size = getattr(self, name)
                if not (size is None or 1 <= size <= most):
                    raise UserError(f"--model.{name} is {size}, but must be from 1 to {most}")
            if not 0 < self.norm_eps < math.inf:
                raise UserError(f"--model.norm_eps is {self.norm_eps}, but must be above 0")
            if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
                raise UserError(f"--model.head_dim is {self.head_dim}, but must be even and at least 2")
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
        # A dictionary, so that layers keep their names if a pipeline stage drops others.
        self.layers = nn.ModuleDict({str(index): self.make_block(index) for index in range(config.n_layers)})
        output = None
        if not config.tie_embeddings:
            output = init(nn.Linear(config.dim, config.vocab_size, bias=False), weight=self.output_init())
        self.head: OutputHead | None = OutputHead(RMSNorm(config.dim, config.norm_eps), output)
        self.is_compiled = False
        """True if blocks are compiled, so that attention needs kernels with constant shapes."""

    def make_block(self, index: int) -> nn.Module:
        """Return the block of a layer: `block(hidden_BLD, rope, attention) -> hidden_BLD`."""
        return TransformerBlock(self.config, index, self.design)

    def window_of_layer(self, index: int) -> int | None:
        """Return the number of tokens that a token sees in a layer, including itself; None: all earlier ones."""
        return None

    def output_init(self) -> TruncatedNormal:
        """Return the initial distribution of untied output weights. Logits have standard deviation 1/4 at any width, so
        the first loss is close to the logarithm of the vocabulary size."""
        return TruncatedNormal(self.config.dim**-0.5 / 4)

    def embedding_init(self) -> TruncatedNormal:
        """Return the initial distribution of the embedding, which has unit variance; if tied, the logits have it."""
        return TruncatedNormal(self.config.dim**-0.5 if self.config.tie_embeddings else 1.0)

    def forward(
        self,
        tokens_BL: Tensor,
        attention: AttentionMetadata | None = None,
        *,
        head: Head = F.linear,
        **head_inputs: Any,
    ) -> Tensor:
        """Return logits (B, L, V), or the result of `head`. A loss passed as `head` never needs to hold all logits.

        Args:
            tokens_BL: token ids; in a pipeline stage other than the first, hidden states (B, L, D).
            attention: positions and documents, with the positions on the device of the tokens. None: each row is one
                document.
            head: called with hidden states, output weights and `head_inputs`.
        """
        device = tokens_BL.device
        if attention is None:
            attention = AttentionMetadata.of_rows(*tokens_BL.shape[:2])
        positions_BL = attention.positions_BL
        if positions_BL is None:
            positions_BL = torch.arange(attention.max_seqlen, device=device)[None]
        head_dim = self.config.resolved_head_dim
        rope = rope_cos_sin(self.config.rope, head_dim, positions_BL)
        hidden_BLD = tokens_BL
        if not tokens_BL.is_floating_point():  # the last stage has a tied embedding, but gets hidden states
            assert self.tok_embeddings is not None, "only the first stage gets tokens"
            hidden_BLD = self.tok_embeddings(tokens_BL)
        windows = {index: self.window_of_layer(int(index)) or attention.window for index in self.layers}
        prepare = partial(
            with_kernel, device=device, dtype=hidden_BLD.dtype, head_dim=head_dim, static=self.is_compiled
        )
        of_window = {window: prepare(replace(attention, window=window)) for window in set(windows.values())}
        for index, block in self.layers.items():
            hidden_BLD = block(hidden_BLD, rope, of_window[windows[index]])
        if self.head is None:
            return hidden_BLD
        tied_VD = None
        if self.config.tie_embeddings:
            assert self.tok_embeddings is not None, "the stage with the head has a copy (shared_modules)"
            tied_VD = effective_weight(self.tok_embeddings)
        return self.head(hidden_BLD, tied_VD, head, **head_inputs)

    def flops_per_token(self, seq_len: int) -> float:
        """Return operations per token, forward and backward, after PaLM (arXiv:2204.02311, B): `6 N + 12 L H Q T`.

        N counts the parameters that multiply every token, so an embedding that is only looked up does not count.
        Attention (L layers, H heads of width Q, T = seq_len) has two matrix products per layer, each with 2 H Q T
        operations forward and twice that number backward. By convention, the causal mask and packed documents do not
        reduce these numbers.

        Of the 6 operations, 2 belong to the forward pass, 2 to the gradient of the parameter (absent if it is frozen),
        and 2 to the gradient of its input. The backward pass ends at the first trained parameter, in order of
        registration within a layer; in layers before it, attention takes only the forward 4 H Q T.
        """
        assert self.tok_embeddings is not None, "asked of a whole model, not of a pipeline stage"
        config = self.config
        scores = 4 * config.n_heads * config.resolved_head_dim * seq_len
        behind = [module for module in self.children() if module not in (self.tok_embeddings, self.layers)]
        head = [self.tok_embeddings] if self.config.tie_embeddings else []
        parts = [*((layer, scores) for layer in self.layers.values()), *((module, 0) for module in (*behind, *head))]
        has_gradient = any(parameter.requires_grad for parameter in self.tok_embeddings.parameters())
        flops = 0.0
        for module, attention in parts:
            for n_elements, is_trained in count_elements(module):
                flops += 2 * n_elements * (1 + is_trained + has_gradient)
                has_gradient |= is_trained
            flops += attention * (3 if has_gradient else 1)
        return flops


class OutputHead(nn.Module):
    """Final norm and output weights, with the loss as its result in training, so that data parallelism gathers its
    weights and reduces their gradients while blocks compute. With tied embeddings, `output` is None. `output` is never
    called, since a loss reads its weights."""

    def __init__(self, norm: nn.Module, output: nn.Linear | None):
        super().__init__()
        self.norm = norm
        self.output = output

    def forward(self, hidden_BLD: Tensor, tied_VD: Tensor | None, head: Head, **head_inputs: Any) -> Tensor:
        """Return `head(normalized hidden states, output weights, …)`; `tied_VD` are the weights of a tied embedding."""
        weight_VD = tied_VD if self.output is None else effective_weight(self.output)
        return head(self.norm(hidden_BLD), weight_VD, **head_inputs)


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, each with a norm before it, and each added to the residual stream."""

    def __init__(self, config: Decoder.Config, index: int, design: BlockDesign):
        super().__init__()
        # Smaller outputs slow the growth of the residual stream's variance with depth (like GPT-2's 1 / sqrt(N)).
        std = _INIT_STD / (2 * (index + 1)) ** 0.5
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = GroupedQueryAttention(
            dim=config.dim,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.resolved_head_dim,
            qk_norm_eps=config.norm_eps if design.qk_norm else None,
            init_std=_INIT_STD,
            out_init_std=std,
        )
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = SwiGLU(dim=config.dim, hidden_dim=config.ffn_dim, init_std=_INIT_STD, out_init_std=std)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], attention: AttentionMetadata) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope, attention)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))

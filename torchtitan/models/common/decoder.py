"""The decoder-only language model that families specialize, and its sharding plan."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.model_sizes import check_decoder_sizes, head_width
from torchtitan.models.common.attention import (
    Attention,
    AttentionOptions,
    GroupedQueryAttention,
    HeadSizes,
)
from torchtitan.models.common.blocks import PerLayerEmbeddings, PreNormBlock, Rope
from torchtitan.models.common.feed_forward import GatedFeedForward, InitStds
from torchtitan.models.common.layer_inputs import BatchInputs, LayerCall
from torchtitan.models.common.norms import RMSNorm
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.model import BaseModel, count_elements, effective_weight
from torchtitan.protocols.output_head import (
    UNCHANGED,
    Head,
    LogitTransform,
    check_scores,
    compute_logits,
)
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.errors import UserError, require

_INIT_STD = 0.02

ATTENTION_SHARDING = {
    "wq": "columns",
    "wk": "columns",
    "wv": "columns",
    "q_norm": "heads",
    "k_norm": "heads",
    "sinks": "own heads",
    "q_wide_norm": "all heads",
    "k_wide_norm": "all heads",
    "wo": "rows",
}
"""Tensor parallelism of the parts of attention."""

DENSE_SHARDING = ShardingPlan(
    tensor={
        "tok_embeddings": "vocabulary",
        "per_layer.tok_embeddings": "vocabulary",
        "per_layer": "local tokens",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention": "whole sequence",
        **{f"layers.*.attention.{name}": split for name, split in ATTENTION_SHARDING.items()},
        "layers.*.attention_post_norm": "sequence",
        "layers.*.ffn_norm": "sequence",
        "layers.*.feed_forward": "whole sequence",
        "layers.*.feed_forward.w1": "columns",
        "layers.*.feed_forward.w3": "columns",
        "layers.*.feed_forward.w2": "rows",
        "layers.*.ffn_post_norm": "sequence",
        # each rank has whole experts, for its own part of the tokens
        "layers.*.moe": "local tokens",
        "layers.*.dense_post_norm": "sequence",
        "layers.*.own": "local tokens",
        "head.norm": "final norm",
        "head.output": "columns",
    },
    attention="layers.*.attention.attend",
)
"""Plan for every decoder built from `models/common`. A part that a model lacks is None in the
model."""


class Decoder(BaseModel):
    """Token embedding → blocks → head. Unchanged, this is Llama; a family overrides the methods
    whose results differ. A pipeline stage has only some parts: every stage after the first takes
    hidden states, and a stage without `head` returns them."""

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
        """Added to the mean square, or variance, in norms."""

        tie_embeddings: bool = False
        """Use the embedding matrix as output weights too."""

        attention_bias: bool = False
        """Add biases to the projections of attention."""

        mlp_bias: bool = False
        """Add biases to all projections of the feed-forward network."""

        rope: RoPEConfig
        """Rotary position embedding."""

        @property
        def layer_kinds(self) -> list[object]:
            """The shapes of each layer's weights, and the operations of its attention."""
            with torch.device("meta"):
                model = cast(Decoder, self.build())
            kinds: list[object] = []
            for index in range(self.n_layers):
                weights = model.layers[str(index)].named_parameters()
                shapes = tuple((name, weight.shape) for name, weight in weights)
                kinds.append((shapes, model.score_flops(index, self.max_seq_len)))
            return kinds

        @property
        def resolved_head_dim(self) -> int:
            """Width of one head, as given or from `dim`."""
            return head_width(self.dim, self.n_heads, self.head_dim)

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            heads = (field.name for field in fields(self) if field.name.endswith("heads"))
            own = {name: getattr(self, name) for name in (*heads, "ffn_dim")}
            return {**own, **self.context_parallel_sizes}

        def pipeline_modules(self) -> list[str]:
            return [
                "tok_embeddings",
                *(f"layers.{index}" for index in range(self.n_layers)),
                "head",
            ]

        @property
        def shared_modules(self) -> list[str]:
            return ["tok_embeddings"] if self.tie_embeddings else []

        def check_positive(self, *names: str) -> None:
            """Raise `UserError` for the first of these fields that is neither None nor above 0."""
            for name in names:
                value = getattr(self, name)
                require(value is None or 0 < value < math.inf, f"--model.{name}", value, "above 0")

        def check_sizes(self, most: int, *names: str, least: int = 1) -> None:
            """Raise `UserError` for the first of these fields that is neither None nor from `least`
            to `most`."""
            for name in names:
                size = getattr(self, name)
                require(
                    size is None or least <= size <= most,
                    f"--model.{name}",
                    size,
                    f"from {least} to {most}",
                )

        def validate(self) -> None:
            check_decoder_sizes(self)
            self.rope.validate(self.resolved_head_dim)

    config: Config

    block_kind: type[nn.Module] = PreNormBlock
    """Class of blocks (`common.blocks`)."""

    norm_kind: type[nn.Module] = RMSNorm
    """Class of norms (`common.norms`)."""

    biased = "qkvo"
    """Projections of attention that `attention_bias` gives a bias."""

    has_qk_norm = False
    """The queries and the keys of each head are normalized."""

    has_sinks = False
    """Attention has a learned score per head without a token (`Sinks`)."""

    has_routers = False
    """Some layers have experts, whose routers get the documents of a batch in training."""

    has_chunks = False
    """Windows do not move with the token, but are consecutive chunks of the document."""

    def __init__(self, config: Config):
        super().__init__(config)
        if config.vocab_size is None:
            raise UserError(
                "model.vocab_size is None: set it before the model is built, as in "
                "config.vocab_size = tokenizer.vocab_size (the Trainer takes it from its tokenizer)"
            )
        init = with_initializers
        # Values would be drawn twice, and on the meta device this would import the compiler, which
        # takes a second.
        embedding = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.dim), freeze=False
        )
        self.tok_embeddings: nn.Embedding | None = init(embedding, weight=self.embedding_init())
        self.per_layer: PerLayerEmbeddings | None = None
        # A dictionary, so that layers keep their names if a pipeline stage drops others.
        self.layers = nn.ModuleDict(
            {str(index): self.make_block(index) for index in range(config.n_layers)}
        )
        output = None
        if config.scores or not config.tie_embeddings:
            width = 1 if config.scores else config.vocab_size
            output = init(nn.Linear(config.dim, width, bias=False), weight=self.output_init())
        self.head: OutputHead | None = OutputHead(
            self.make_norm(config.dim), output, self.logit_transform()
        )
        self.is_compiled = False
        """True if blocks are compiled, so that attention needs kernels with constant shapes."""

    def make_block(
        self, index: int, *, kind: type[nn.Module] | None = None, **options: object
    ) -> nn.Module:
        """Return the block of a layer: `block(hidden_BLD, rope, attention) -> hidden_BLD`;
        `options` are arguments of its `kind`, by default `block_kind`. `rope` is None if the layer
        has no positions."""
        parts = self.make_mixer(index), self.make_feed_forward(index)
        return (kind or self.block_kind)(
            *parts, dim=self.config.dim, norm=self.make_norm, **options
        )

    def make_mixer(self, index: int) -> nn.Module | None:
        """Return the part of a layer through which tokens see earlier ones, called like attention;
        None: the layer has none."""
        return self.make_attention(index)

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        """Return the attention of a layer, by default a `GroupedQueryAttention`."""
        kind = options.pop("kind", GroupedQueryAttention)
        attend, scale = options.pop("attend", None), options.pop("scale", None)
        if attend is None:
            attend = Attention(scale=scale, softcap=self.score_softcap(), has_sinks=self.has_sinks)
        own: AttentionOptions = {
            "biases": self.biased if self.config.attention_bias else "",
            "qk_norm": self.make_norm if self.has_qk_norm else None,
            **self.init_stds(index),
        }
        return kind(self.head_sizes(index), attend, **{**own, **options})

    def head_sizes(self, index: int) -> HeadSizes:
        """Return the sizes of a layer's attention."""
        config = self.config
        return HeadSizes(
            dim=config.dim,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=self.head_dim_of_layer(index),
        )

    def make_feed_forward(
        self, index: int, kind: Callable[..., nn.Module] = GatedFeedForward, **options: object
    ) -> nn.Module | None:
        """Return the feed-forward network of a layer; `options` are arguments of its `kind`
        (`common.feed_forward`). None: the layer has none."""
        options = {"bias": True, **options} if self.config.mlp_bias else options
        return kind(
            **{
                "dim": self.config.dim,
                "hidden_dim": self.config.ffn_dim,
                **self.init_stds(index),
                **options,
            }
        )

    def make_norm(self, dim: int) -> nn.Module:
        """Return a norm over `dim` elements, of a block or of the head."""
        return self.norm_kind(dim, self.config.norm_eps)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Return the hidden states (B, L, D) before the first block."""
        assert self.tok_embeddings is not None, "only the first stage gets tokens"
        hidden_BLD: Tensor = self.tok_embeddings(tokens_BL)
        return hidden_BLD

    def head_dim_of_layer(self, index: int) -> int:
        """Return the width of a layer's heads."""
        return self.config.resolved_head_dim

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        """Return the rotary position embedding of a layer; None: it has no positions."""
        return self.config.rope

    def window_of_layer(self, index: int) -> int | None:
        """Return the number of tokens that a token sees in a layer, including itself; None: all
        earlier ones."""
        return None

    def score_softcap(self) -> float | None:
        """Return the soft cap of attention scores; None: no cap."""
        return None

    def logit_transform(self) -> LogitTransform:
        """Return the transform of the logits before the softmax."""
        return UNCHANGED

    def init_stds(self, index: int) -> InitStds:
        """Return the standard deviations of the initial input and output projections of a layer.
        The latter fall with depth, so that the residual stream's variance grows slowly (like
        GPT-2's 1 / sqrt(N))."""
        return {"init_std": _INIT_STD, "out_init_std": _INIT_STD / (2 * (index + 1)) ** 0.5}

    def output_init(self) -> TruncatedNormal:
        """Return the initial distribution of untied output weights. Logits have standard deviation
        1/4 at any width, so the first loss is close to the logarithm of the vocabulary size."""
        return TruncatedNormal(self.config.dim**-0.5 / 4)

    def embedding_init(self) -> TruncatedNormal:
        """Return the initial distribution of the embedding, which has unit variance; if tied, the
        logits have it."""
        return TruncatedNormal(self.config.dim**-0.5 if self.config.tie_embeddings else 1.0)

    def forward(
        self,
        tokens_BL: Tensor,
        attention: AttentionMetadata | None = None,
        *,
        head: Head = compute_logits,
        **head_inputs: object,
    ) -> Tensor:
        """Return logits (B, L, V), or the result of `head`. A loss passed as `head` never needs to
        hold all logits.

        Args:
            tokens_BL: token ids; in a pipeline stage other than the first, hidden states (B, L, D).
            attention: positions and documents; positions are on the tokens' device. None: each row
                is one document.
            head: called with hidden states, output weights and `head_inputs`.
        """
        device = tokens_BL.device
        if tokens_BL.ndim < 2:
            raise UserError(
                f"the tokens have the shape {tuple(tokens_BL.shape)}, without a batch; pass "
                "tokens[None], of shape (1, length)"
            )
        if attention is None:
            attention = AttentionMetadata.of_rows(*tokens_BL.shape[:2])
        if self.has_routers and (self.training or attention.experts_BLNK is not None):
            attention = attention.with_documents(device)
        positions_BL = attention.positions_BL
        if positions_BL is None:
            positions_BL = torch.arange(attention.max_seqlen, device=device)[None]
        # The last stage has a tied embedding, but gets hidden states.
        hidden_BLD = tokens_BL if tokens_BL.is_floating_point() else self._embedded(tokens_BL)
        inputs = BatchInputs(
            attention,
            positions_BL,
            has_chunks=self.has_chunks,
            dtype=hidden_BLD.dtype,
            static=self.is_compiled,
            capped=self.has_sinks or self.score_softcap() is not None,
        )
        calls = self._layer_calls(inputs)
        hidden_BLD = self.run_blocks(calls, tokens_BL, hidden_BLD)
        if self.head is None:
            return hidden_BLD
        tied_VD = None
        if self.config.tie_embeddings:
            assert self.tok_embeddings is not None, (
                "the stage with the head has a copy (shared_modules)"
            )
            tied_VD = effective_weight(self.tok_embeddings)
        if self.training and len(self.layers) > self.config.n_layers and "labels_BL" in head_inputs:
            last = calls[-1]
            head = self.training_head(head, tokens_BL, positions_BL, last.rope, last.attention)
        return self.head(hidden_BLD, tied_VD, head, **head_inputs)

    def _embedded(self, tokens_BL: Tensor) -> Tensor:
        """Return the result of `embed`. Raise `UserError` for ids outside the vocabulary on a CPU;
        on a GPU, the host would have to wait for the tokens."""
        try:
            return self.embed(tokens_BL)
        except IndexError as error:
            assert self.config.vocab_size is not None, "checked in __init__"
            size = self.config.vocab_size
            wrong = tokens_BL[(tokens_BL < 0) | (tokens_BL >= size)]
            if not len(wrong):
                raise
            raise UserError(
                f"token id {int(wrong[0])} is outside the model's vocabulary of {size:,} (ids 0 to "
                f"{size - 1}); encode the text with the model's own tokenizer"
            ) from error

    def _layer_calls(self, inputs: BatchInputs) -> list[LayerCall]:
        """Return this stage's layers with their inputs, without those after the last layer."""
        calls = []
        for name, block in self.layers.items():
            index = int(name)
            if index < self.config.n_layers:
                head_dim = self.head_dim_of_layer(index)
                rope = inputs.rope(self.rope_of_layer(index), head_dim)
                attention = inputs.attention(self.window_of_layer(index), head_dim)
                calls.append(LayerCall(block, rope, attention))
        return calls

    def run_blocks(
        self, calls: Sequence[LayerCall], tokens_BL: Tensor, hidden_BLD: Tensor
    ) -> Tensor:
        """Return the hidden states after the last block; `calls`: each block, with its inputs
        besides hidden states."""
        for call in calls:
            hidden_BLD = call.block(hidden_BLD, call.rope, call.attention)
        return hidden_BLD

    def training_head(
        self,
        head: Head,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        rope: Rope,
        attention: AttentionMetadata,
    ) -> Head:
        """Return the training loss of a model with layers after the last one; they get the same
        `rope` and `attention` as the last layer."""
        raise NotImplementedError

    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{index}": block for index, block in self.layers.items()}

    def units(self) -> list[nn.Module]:
        # The head also uses a tied embedding, so it belongs to the root unit.
        embedding = None if self.config.tie_embeddings else self.tok_embeddings
        return [
            unit
            for unit in (embedding, self.per_layer, *self.layers.values(), self.head)
            if unit is not None
        ]

    def cache_boundaries(self) -> frozenset[int]:
        ropes = (self.rope_of_layer(int(index)) for index in self.layers)
        return frozenset(
            rope.original_max_seq_len for rope in ropes if rope and rope.scaling == "longrope"
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return operations per token, forward and backward, after PaLM (arXiv:2204.02311, B): `6 N
        + 12 L H Q T`.

        N counts the parameters that multiply every token, so an embedding that is only looked up
        does not count. Attention (L layers, H heads of width Q, T = seq_len) has two matrix
        products per layer, each with 2 H Q T operations forward and twice that number backward. By
        convention, the causal mask and packed documents do not reduce these numbers; in a layer
        with a window, T is at most the window.

        Of the 6 operations, 2 belong to the forward pass, 2 to the gradient of the parameter
        (absent if it is frozen), and 2 to the gradient of its input. The backward pass ends at the
        first trained parameter, in order of registration within a layer; in layers before it,
        attention takes only the forward 4 H Q T.
        """
        assert self.tok_embeddings is not None, "asked of a whole model, not of a pipeline stage"
        scores = [self.score_flops(int(index), seq_len) for index in self.layers]
        behind = [
            module for module in self.children() if module not in (self.tok_embeddings, self.layers)
        ]
        output = getattr(self.head, "output", None) or self.tok_embeddings
        # of the output weights, by layers after the last
        n_uses = len(self.layers) - self.config.n_layers
        if output is self.tok_embeddings:
            n_uses += 1
        behind += [output] * n_uses
        parts = [
            *zip(self.layers.values(), scores, strict=True),
            *((module, 0) for module in behind),
        ]
        has_gradient = any(
            parameter.requires_grad for parameter in self.tok_embeddings.parameters()
        )
        flops = 0.0
        for module, attention in parts:
            for n_elements, is_trained in count_elements(module):
                passes = 1 + int(is_trained) + int(has_gradient)
                flops += 2 * n_elements * passes
                has_gradient |= is_trained
            flops += attention * (3 if has_gradient else 1)
        return flops

    def score_flops(self, index: int, seq_len: int) -> float:
        """Return the operations per token of a layer's attention, without its weights, in the
        forward pass."""
        window = self.window_of_layer(index) or seq_len
        return 4 * self.config.n_heads * self.head_dim_of_layer(index) * min(seq_len, window)


class OutputHead(nn.Module):
    """Final norm and output weights, with the loss as its result in training, so that data
    parallelism gathers its weights and reduces their gradients while blocks compute. With tied
    embeddings, `output` is None. `output` is never called, since a loss reads its weights."""

    def __init__(
        self, norm: nn.Module, output: nn.Linear | None, transform: LogitTransform = UNCHANGED
    ):
        super().__init__()
        self.norm = norm
        self.output = output
        self.transform = transform

    def forward(
        self, hidden_BLD: Tensor, tied_VD: Tensor | None, head: Head, **head_inputs: object
    ) -> Tensor:
        """Return `head(normalized hidden states, output weights, …)`; `tied_VD` are the weights of
        a tied embedding."""
        weight_VD = tied_VD if self.output is None else effective_weight(self.output)
        if weight_VD is not None:
            check_scores(weight_VD, head)
        if self.transform != UNCHANGED and head is not F.linear:
            head_inputs["transform"] = self.transform
        return head(self.norm(hidden_BLD), weight_VD, **head_inputs)

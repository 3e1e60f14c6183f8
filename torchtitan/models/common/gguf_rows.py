"""Names and layouts of decoders' weights in GGUF; each family takes the rows of its own weights."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.models.common.hugging_face import module_rows
from torchtitan.protocols.state_dict_adapter import Concatenated, KeyMapping, Permuted, Transform


class OneWay(Transform):
    """A transform of a format that is only written."""

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        raise NotImplementedError("GGUF is only written")


@dataclass(frozen=True)
class Chain(OneWay):
    """Transforms, one after the other."""

    transforms: tuple[Transform, ...]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return functools.reduce(
            lambda given, step: step.to_external(given), self.transforms, tensors
        )


class NegatedExp(OneWay):
    """Logarithms of the rates with which states decay, as the negative rates."""

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [-tensor.float().exp() for tensor in tensors]


@dataclass(frozen=True)
class PlusOne(OneWay):
    """Weights of norms that are added to 1 here, and not there."""

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.float() + 1 for tensor in tensors]


@dataclass(frozen=True)
class Unbound(OneWay):
    """One of our tensors, split into one for each index of its dimension 1."""

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind(dim=1))


@dataclass(frozen=True)
class Constant(OneWay):
    """A tensor of the other format that is part of our configuration."""

    values: tuple[float, ...]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(self.values, dtype=torch.float32)]


_MODULES = {
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.q_wide_norm": "attn_q_norm",
    "attention.k_wide_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "ffn_post_norm": "post_ffw_norm",
    "moe.router": "ffn_gate_inp",
    "moe.shared.w1": "ffn_gate_shexp",
    "moe.shared.w2": "ffn_down_shexp",
    "moe.shared.w3": "ffn_up_shexp",
}

ROWS = (
    KeyMapping("tok_embeddings.weight", "token_embd.weight"),
    *module_rows("layers.*", "blk.*", _MODULES),
    KeyMapping(
        "layers.*.moe.experts.w13",
        ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight"),
        Unbound(),
    ),
    KeyMapping("layers.*.moe.experts.w2", "blk.*.ffn_down_exps.weight"),
    KeyMapping(
        "layers.*.moe.experts.bias13",
        ("blk.*.ffn_gate_exps.bias", "blk.*.ffn_up_exps.bias"),
        Unbound(),
    ),
    KeyMapping("layers.*.moe.experts.bias2", "blk.*.ffn_down_exps.bias"),
    KeyMapping("layers.*.moe.router.selection.bias_E", "blk.*.exp_probs_b.bias"),
    KeyMapping("layers.*.attention.sinks.scores", "blk.*.attn_sinks.weight"),
    KeyMapping(
        "layers.*.moe.shared.gate", "blk.*.ffn_gate_inp_shexp.weight", Permuted((0, 1), joined=0)
    ),
    KeyMapping("head.norm.weight", "output_norm.weight"),
    KeyMapping("head.output.weight", "output.weight"),
)

POST_ATTENTION_NORM = module_rows("layers.*", "blk.*", {"ffn_norm": "post_attention_norm"})
"""The norm before the feed-forward network, in architectures that call it so."""

FUSED_QKV = KeyMapping(
    tuple(f"layers.*.attention.{name}.weight" for name in ("wq", "wk", "wv")),
    "blk.*.attn_qkv.weight",
    Concatenated(0),
)
FUSED_GATE_UP = KeyMapping(
    ("layers.*.feed_forward.w1.weight", "layers.*.feed_forward.w3.weight"),
    "blk.*.ffn_up.weight",
    Concatenated(0),
)

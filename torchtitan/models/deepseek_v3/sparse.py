"""DeepSeek-V3.2 (arXiv:2512.02556), and GLM-5 and 5.2 (arXiv:2603.12201): DeepSeek-V3 with sparse
attention, and their Hugging Face format."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from torchtitan.models.common.blocks import SharingBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf import Architecture, Rotation, require_gguf
from torchtitan.models.common.gguf_latent import latent_rows
from torchtitan.models.common.hugging_face import module_rows
from torchtitan.models.common.layer_inputs import LayerCall
from torchtitan.models.common.moe import rows
from torchtitan.models.common.sparse_attention import (
    Indexer,
    SharedChoiceAttention,
    SparseLatentAttention,
)
from torchtitan.models.deepseek_v3.model import (
    GGUF,
    V3,
    DeepSeekModel,
    gguf_keys,
    require_usual_growth,
    with_latents,
    write_types,
)
from torchtitan.protocols.state_dict_adapter import KeyMapping
from torchtitan.tools.errors import require


class DeepSeekSparseModel(DeepSeekModel):
    """DeepSeek-V3's decoder with an indexer, which chooses the tokens that each token sees."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekModel.Config):
        index_topk: int = 2048
        """Tokens that a token sees, including itself."""

        index_n_heads: int = 64
        """Heads of the indexer."""

        index_head_dim: int = 128
        """Width of a head of the indexer, whose first part is rotated."""

        index_interleave: bool = False
        """Rotate neighboring pairs of elements in the indexer, not two halves (GLM-5)."""

        indexer_types: list[Literal["full", "shared"]] = field(default_factory=lambda: ["full"])
        """Types of the first layers, repeated for the others; shared ones see the tokens that the
        last full layer before them chooses."""

        @property
        def is_sharing(self) -> bool:
            """True if some layers share the choice of an earlier one."""
            return any(self.shares_choice(index) for index in range(self.n_layers))

        def shares_choice(self, index: int) -> bool:
            """Return whether a layer sees the tokens that an earlier one chooses."""
            return self.indexer_types[index % len(self.indexer_types)] == "shared"

        def unsupported_parallelisms(self) -> dict[str, str]:
            reason = "layers see the tokens that a layer before their stage chooses"
            own = {"pipeline_parallel_degree": reason} if self.is_sharing else {}
            return {**DeepSeekModel.Config.unsupported_parallelisms(self), **own}

        def validate(self) -> None:
            DeepSeekModel.Config.validate(self)
            types = self.indexer_types
            fits = bool(types) and types[0] == "full"
            require(fits, "--model.indexer_types", types, "a list that begins with full")
            n_mtp, must = self.n_mtp_modules, "0 if layers share a choice"
            require(not (n_mtp and self.is_sharing), "--model.n_mtp_modules", n_mtp, must)
            self.check_sizes(2**24, "index_topk", "index_n_heads", "index_head_dim")
            rank, width = self.q_lora_rank, self.index_head_dim
            require(rank is not None, "--model.q_lora_rank", rank, "a width, for the indexer")
            rotated = self.rope.rotated_dim(self.resolved_head_dim)
            least = f"at least the rotated part of a head, {rotated}"
            require(width >= rotated, "--model.index_head_dim", width, least)

    config: Config

    def make_block(self, index: int, **options: Any) -> nn.Module:
        own = {"kind": SharingBlock} if self.config.is_sharing else {}
        return super().make_block(index, **own, **options)

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        config = self.config
        if config.shares_choice(index):
            return super().make_attention(index, kind=SharedChoiceAttention, **options)
        heads = {"n_heads": config.index_n_heads, "head_dim": config.index_head_dim}
        indexer = {**heads, "interleaved": config.index_interleave}
        own = {"kind": SparseLatentAttention, "top_k": config.index_topk, "indexer": indexer}
        return super().make_attention(index, **own, gives_choice=config.is_sharing, **options)

    def run_blocks(
        self, calls: Sequence[LayerCall], tokens_BL: Tensor, hidden_BLD: Tensor
    ) -> Tensor:
        if not self.config.is_sharing:
            return super().run_blocks(calls, tokens_BL, hidden_BLD)
        choice: list[Tensor] = []  # of the last full layer
        for index, call in enumerate(calls):
            is_shared = self.config.shares_choice(index)
            shared = choice if is_shared else []
            hidden_BLD, *given = call.block(hidden_BLD, call.rope, call.attention, *shared)
            choice = choice if is_shared else given
        return hidden_BLD

    def score_flops(self, index: int, seq_len: int) -> float:
        return super().score_flops(index, min(seq_len, self.config.index_topk))

    def flops_per_token(self, seq_len: int) -> float:
        # The indexer has no backward pass.
        config = self.config
        index_flops = 2 * config.index_n_heads * config.index_head_dim * seq_len
        n_indexers = sum(isinstance(module, Indexer) for module in self.modules())
        return super().flops_per_token(seq_len) + n_indexers * index_flops


_INDEXER = tuple(
    KeyMapping(
        f"layers.*.attention.indexer.{ours}", f"model.layers.*.self_attn.indexer.{theirs}.weight"
    )
    for ours, theirs in {"wq": "wq_b", "wk": "wk", "wh": "weights_proj"}.items()
)
_INDEXER += module_rows(
    "layers.*.attention.indexer", "model.layers.*.self_attn.indexer", {"k_norm": "k_norm"}
)


def _rows(config: DeepSeekSparseModel.Config) -> tuple[KeyMapping, ...]:
    assert callable(V3.rows)
    return (*V3.rows(config), *_INDEXER)


def _prepare(document: dict[str, object], plain: int) -> dict[str, object]:
    """Return a config.json with the types of all feed-forward networks and the widths of heads.
    Raise `UserError` for layers with other attention."""
    types, only = document.get("layer_types", []), "indexed_attention"
    if not (isinstance(types, list) and all(kind == only for kind in types)):
        raise ConfigReader("config.json", document).wrong("layer_types", types, f"{only} alone")
    document = {key: value for key, value in document.items() if key != "layer_types"}
    if document.get("mlp_layer_types") is None:
        document = rows.prepare_dense_layers(document, default=3)
    return with_latents(document, plain)


def _prepare_glm(document: dict[str, object]) -> dict[str, object]:
    """Return the same, with the types of indexers for a pattern of letters, or a layer's distance
    from the next full one. Raise `UserError` for unusable ones."""
    reader = ConfigReader("config.json", document)
    if document.get("indexer_types") is not None:
        return _prepare(document, plain=192)
    pattern = document.get("index_topk_pattern")
    if isinstance(pattern, list):
        return _prepare({**document, "indexer_types": pattern}, plain=192)
    if pattern is None:
        every = reader.whole_number("index_topk_freq", 1)
        first = reader.whole_number("index_skip_topk_offset", 2, least=0) - 1
        n_layers = reader.n_layers()
        pattern = "".join("FS"[max(i - first, 0) % every > 0] for i in range(n_layers))
    if not (isinstance(pattern, str) and {*pattern} <= {"F", "S"}):
        raise reader.wrong("index_topk_pattern", pattern, "a text of F and S")
    types = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    return _prepare({**document, "indexer_types": types}, plain=192)


_KEYS = {key: name for key, name in V3.keys.items() if key != "rope_interleave"}
_SAME = ("index_topk", "index_n_heads", "index_head_dim")
_V32 = replace(
    V3,
    architecture="DeepseekV32ForCausalLM",
    config=DeepSeekSparseModel.Config,
    rows=_rows,
    keys={**_KEYS, **{k: k for k in _SAME}, "indexer_rope_interleave": "index_interleave"},
    defaults={**V3.defaults, "num_key_value_heads": 128},
    fixed={**V3.fixed, "indexer_rope_interleave": False, "rope_interleave": True},
    prepare=lambda document: _prepare(document, plain=128),
    write=write_types,
)
_GLM_5 = replace(
    _V32,
    architecture="GlmMoeDsaForCausalLM",
    defaults={
        **_V32.defaults,
        **{"num_key_value_heads": 64, "q_lora_rank": 2048, "v_head_dim": 256},
        **{"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "index_n_heads": 32},
    },
    keys={**_V32.keys, "indexer_types": "indexer_types"},
    fixed={**_V32.fixed, "indexer_rope_interleave": True},
    ignored=(
        *V3.ignored,
        *("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
        *("index_share_for_mtp_iteration", "moe_router_dtype"),
    ),
    prepare=_prepare_glm,
)

TYPES = {"deepseek_v32": _V32, "glm_moe_dsa": _GLM_5}

_GGUF_NAMES = {"wq": "attn_q_b", "wk": "attn_k", "wh": "proj"}
_KEY_UNIT = 64
"""llama.cpp rotates keys of the indexer by a Hadamard matrix of this width, or more."""


def _gguf_rows(config: DeepSeekSparseModel.Config) -> tuple[KeyMapping, ...]:
    ours = "layers.*.attention.indexer"
    return (
        *latent_rows(config),
        *(
            KeyMapping(f"{ours}.{name}", f"blk.*.indexer.{theirs}.weight")
            for name, theirs in _GGUF_NAMES.items()
        ),
        *module_rows(ours, "blk.*.indexer", {"k_norm": "k_norm"}),
    )


def _gguf_keys(config: DeepSeekSparseModel.Config) -> dict[str, object]:
    width, must = config.index_head_dim, f"a multiple of {_KEY_UNIT}"
    require_gguf(width % _KEY_UNIT == 0, "index_head_dim", width, must)
    return {
        **gguf_keys(config),
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": width,
        "attention.indexer.top_k": config.index_topk,
    }


def _gguf_types(config: DeepSeekSparseModel.Config) -> dict[str, object]:
    full = [int(not config.shares_choice(index)) for index in range(config.n_layers)]
    return {**_gguf_keys(config), "attention.indexer.types": full}


def _gguf_without_types(config: DeepSeekSparseModel.Config) -> dict[str, object]:
    require_gguf(not config.is_sharing, "indexer_types", config.indexer_types, "full alone")
    require_usual_growth(config)
    return _gguf_keys(config)


class _Interleaved(Architecture):
    """The architecture of models whose indexer rotates neighboring values."""

    def is_for(self, config: Decoder.Config) -> bool:
        if not super().is_for(config) or not isinstance(config, DeepSeekSparseModel.Config):
            return False
        return config.index_interleave


ARCHITECTURES = (
    _Interleaved(
        name="glm-dsa",
        config=DeepSeekSparseModel.Config,
        rows=_gguf_rows,
        rotation=Rotation(part=True, scalings=()),
        experts=GGUF.experts,
        keys=_gguf_types,
    ),
    replace(
        GGUF,
        name="deepseek32",
        config=DeepSeekSparseModel.Config,
        rows=_gguf_rows,
        keys=_gguf_without_types,
    ),
)

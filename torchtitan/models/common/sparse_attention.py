"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556, 2.1): latent attention in which an
indexer chooses the tokens that each token sees."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.attention import seen_keys
from torchtitan.models.common.attention_scores import BLOCK
from torchtitan.models.common.blocks import Rope
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.latent_attention import LatentAttention, LatentScores
from torchtitan.models.common.norms import LayerNorm
from torchtitan.models.common.rope import apply_rope
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers


class SparseQueries(NamedTuple):
    """Queries of attention and of the indexer."""

    q_BLHD: Tensor

    index_BLJE: Tensor
    """Queries of J heads of width E."""

    weights_BLJ: Tensor
    """Weight of each of these heads in the sum of scores."""


class Indexer(nn.Module):
    """Queries, one key and weights of `n_heads` heads of width `head_dim`, for the choice of the
    tokens with the largest scores. Its parameters are frozen, since the choice has no gradient:
    DeepSeek trains them separately, by the divergence of their scores from attention's scores.

    `interleaved`: RoPE, of the first part of each head, rotates neighbors.
    """

    def __init__(
        self,
        dim: int,
        q_rank: int,
        *,
        n_heads: int,
        head_dim: int,
        rotated_dim: int,
        interleaved: bool,
        init_std: float,
    ):
        super().__init__()
        self.widths = [n_heads * head_dim, head_dim, n_heads]
        self.head_dim, self.rotated_dim = head_dim, rotated_dim
        self.interleaved = interleaved
        # Not linear layers: converters take all of them, and adapters would get no gradient.
        self.wq = nn.Parameter(torch.empty(self.widths[0], q_rank))
        self.wk = nn.Parameter(torch.empty(head_dim, dim))
        self.wh = nn.Parameter(torch.empty(n_heads, dim))
        init = TruncatedNormal(init_std)
        with_initializers(self, wq=init, wk=init, wh=init)
        self.k_norm = LayerNorm(head_dim, eps=1e-6)
        self.requires_grad_(False)

    def forward(self, x_BLD: Tensor, latent_BLR: Tensor) -> Tensor:
        """Return queries, key and weights of each token, (B, L, the sum of `widths`), from its
        hidden state and the latent of its queries."""
        parts = latent_BLR @ self.wq.T, self.k_norm(x_BLD @ self.wk.T), x_BLD @ self.wh.T
        return torch.cat(parts, dim=-1)

    def split(
        self, index_BLE: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, L, J, E) and key (B, L, 1, E), both rotated, and weights (B, L, J)."""
        q_BLE, k_BLE, weights_BLJ = index_BLE.split(self.widths, dim=-1)
        q_BLJE, k_BL1E = (
            self._rotate(x_BLE.unflatten(-1, (-1, self.head_dim)), rope) for x_BLE in (q_BLE, k_BLE)
        )
        return q_BLJE, k_BL1E, weights_BLJ

    def _rotate(self, x_BLJE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        if not self.interleaved:
            return apply_rope(x_BLJE, rope)
        x_BLJP, plain_BLJE = x_BLJE.tensor_split([self.rotated_dim], dim=-1)
        x_BLJP = x_BLJP.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return torch.cat((apply_rope(x_BLJP, rope), plain_BLJE), dim=-1)


class SparseLatentScores(LatentScores):
    """Attention of queries to the `top_k` latents that the indexer chooses for each token. The
    keys of the indexer follow the latents, so that both are gathered and stored together. With
    `gives_choice`, it is a second result, if there is a choice."""

    def __init__(self, *parts: Any, top_k: int, index_dim: int, gives_choice: bool):
        super().__init__(*parts)
        self.top_k, self.index_dim = top_k, index_dim
        self.gives_choice = gives_choice

    def forward(
        self, q: Any, latent_BS1R: Tensor, k_BS1P: Tensor, attention: AttentionMetadata
    ) -> Any:
        """Return (B, L, H, v_dim), for `SparseQueries`."""
        latent_BS1R, index_BS1E = latent_BS1R.tensor_split([-self.index_dim], dim=-1)
        choice = []
        if latent_BS1R.shape[1] > self.top_k:
            choice = [self.choose(q, index_BS1E[:, :, 0], attention)]
        attention = _of_chosen(attention, *choice)
        out_BLHE = super().forward(q.q_BLHD, latent_BS1R, k_BS1P, attention)
        return (out_BLHE, *choice) if self.gives_choice else out_BLHE

    @torch.no_grad()
    def choose(self, q: SparseQueries, k_BSE: Tensor, attention: AttentionMetadata) -> Tensor:
        """Return which keys each token sees, (B, L, S): the keys of its document, not after it,
        with the largest scores `sum_j w_j relu(q_j k)` (equation 1)."""
        seen_BLS = seen_keys(attention, k_BSE.device)
        seen_BLS = seen_BLS.expand(len(k_BSE), -1, -1)
        factor = self.index_dim**-0.5 * q.index_BLJE.shape[2] ** -0.5
        k_B1ES, masks = k_BSE.float().mT[:, None], []
        for first in range(0, seen_BLS.shape[1], BLOCK):
            part = slice(first, first + BLOCK)
            products_BLJS = F.relu(q.index_BLJE[:, part].float() @ k_B1ES)
            weights_BL1J = factor * q.weights_BLJ[:, part, None].float()
            scores_BLS = (weights_BL1J @ products_BLJS)[:, :, 0]
            scores_BLS = scores_BLS.masked_fill(~seen_BLS[:, part], -torch.inf)
            chosen_BLK = scores_BLS.topk(self.top_k, dim=-1).indices
            masks.append(torch.zeros_like(seen_BLS[:, part]).scatter(-1, chosen_BLK, True))
        # A token with fewer keys has chosen further ones, which it does not see.
        return torch.cat(masks, dim=1) & seen_BLS


def _of_chosen(attention: AttentionMetadata, *choice_BLS: Tensor) -> AttentionMetadata:
    """Describe attention to the keys of a choice; without it, to all."""
    if not choice_BLS:
        return attention
    return replace(attention, kernel="dense", mask=choice_BLS[0][:, None])


class SparseLatentAttention(LatentAttention):
    """Latent attention to the tokens that an indexer chooses, at most `top_k`. `indexer`: arguments
    of `Indexer` besides sizes of attention. With `gives_choice`, it is a second result."""

    q_latent: nn.Sequential
    indexer: Indexer
    indexes: nn.Module

    def __init__(
        self,
        config: Decoder.Config,
        *,
        q_rank: int,
        top_k: int,
        indexer: Any,
        gives_choice: bool,
        **options: Any,
    ):
        widths = {"top_k": top_k, "index_dim": indexer["head_dim"]}
        self.chosen = {**widths, "gives_choice": gives_choice}
        super().__init__(config, q_rank=q_rank, **options)
        sizes = {"rotated_dim": self.widths[1], "init_std": options["init_std"]}
        self.indexer = Indexer(config.dim, q_rank, **sizes, **indexer)
        # tensor parallelism gathers its input, as of `latents`
        self.indexes = nn.Identity()

    def make_scores(self, *parts: Any) -> LatentScores:
        return SparseLatentScores(*parts, **self.chosen)

    def forward(self, x_BLD: Tensor, rope: Rope, attention: AttentionMetadata) -> Any:
        """(B, L, dim) → (B, L, dim), and the keys that tokens see, (B, L, S)."""
        assert rope is not None, "the indexer rotates"
        latent_BLR = self.q_latent[1](self.q_latent[0](x_BLD))
        with torch.no_grad():
            index_BLE = self.indexes(self.indexer(x_BLD, latent_BLR))
            index_BLJE, key_BL1E, weights_BLJ = self.indexer.split(index_BLE, rope)
        q_BLHD = self.queries(self.q_latent[2](latent_BLR), rope)
        latent_BL1R, k_BL1P = self.keys(x_BLD, rope)
        keys_BL1E = torch.cat((latent_BL1R, key_BL1E), dim=-1)
        queries = SparseQueries(q_BLHD, index_BLJE, weights_BLJ)
        attended = self.attend(queries, keys_BL1E, k_BL1P, attention)
        out_BLHE, *choice = attended if isinstance(attended, tuple) else (attended,)
        out_BLD = self.wo(out_BLHE.flatten(-2))
        return (out_BLD, *choice) if choice else out_BLD

    def reason_not_to_scale(self) -> str:
        return "scores of tokens that its indexer does not choose would count"


class SharedChoiceAttention(LatentAttention):
    """Latent attention to the tokens that an earlier layer chooses (GLM-5.2)."""

    def forward(
        self,
        x_BLD: Tensor,
        rope: Rope,
        attention: AttentionMetadata,
        *choice_BLS: Tensor,
    ) -> Tensor:
        """(B, L, dim) → (B, L, dim). Without `choice_BLS`, tokens see all earlier ones."""
        return super().forward(x_BLD, rope, _of_chosen(attention, *choice_BLS))

    def reason_not_to_scale(self) -> str:
        return "scores of tokens that an indexer does not choose would count"

"""The layouts of the matrix: a name, a number of processes, and options, written with `__` for
`.`."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tests.training import ABSENT

Options = Mapping[str, Any]

PROBLEM: Options = {
    "training__steps": 10,
    "training__seq_len": 64,
    "training__global_batch_size": 16,
    "training__mixed_precision_param": "float32",
    # Between the smallest and the largest gradient norm, so that only some steps are clipped.
    "training__max_norm": 2.2,
    "model__n_layers": 4,
    "optimizer__name": "SGD",
    "optimizer__lr": 0.1,
    # Does not divide the tokens of a local batch.
    "loss__chunk_tokens": 100,
    "validator__enable": True,
    "validator__freq": 5,
    "validator__steps": 2,
}
"""Options of every run, in any layout and in a single process."""

_PASSES = 2
"""Local batches per rank and step, with accumulated gradients."""

_LAYOUT_SECTIONS = ("parallelism", "activation_checkpoint", "compile")
_LAYOUT_OPTIONS = (
    "training__local_batch_size",
    "training__enable_cpu_offload",
    "optimizer__early_step_in_backward",
    "loss__chunk_tokens",
)

ADAMW: Options = {"optimizer__name": "AdamW", "optimizer__lr": 3e-4, "optimizer__eps": 1e-6}
"""With the usual eps of 1e-8, an element with a gradient near 0 takes a full step in a direction
that depends on the order of sums. One such element changed a matrix by 1.1e-5."""
TIED: Options = {"model__tie_embeddings": True}
UNEVEN_VOCABULARY: Options = {"model__vocab_size": 2051}
NO_DOCUMENTS: Options = {"dataloader__document_mask": False}
TWELVE_LAYERS: Options = {"model__n_layers": 12}
QWEN3: Options = {"module": "qwen3"}
"""A model with norms per head of queries and keys, and with heads that are together wider than the
model."""
WINDOWS: Options = {"module": "mistral", "model__sliding_window": 12}
"""A window in every layer, shorter than most documents."""
DELTA_NETS: Options = {"module": "qwen3_5", "model__norm_eps": 1e-2}
"""A model with gated delta nets in three of four layers. If a query and a key are nearly
orthogonal, the norm of a document's first output magnifies rounding by up to 1 / sqrt(eps)."""

CLASS: Options = {
    "module": "transformers",
    "config": "transformers_debugmodel_dense",
    **dict.fromkeys(("model__dim", "model__ffn_dim", "model__n_layers"), ABSENT),
}
"""A class of transformers with attention alone."""
HYBRID_CLASS: Options = {**CLASS, "config": "transformers_debugmodel"}
"""A class of transformers with convolutions, whose documents are rows."""
PENALTIES: Options = {
    "model__moe__penalties__batch_loss": 0.3,
    "model__moe__penalties__sequence_loss": 0.3,
    "model__moe__penalties__z_loss": 0.01,
}
"""Auxiliary losses so large that a wrong scale changes the run."""
EXPERTS: Options = {"module": "qwen3_moe", "debug__seed": 1, **PENALTIES}
"""A model with experts and a softmax router; each token passes through four experts. With seed 0,
rounding chooses in step 5: in float64, two experts' probabilities differ by 3e-8, and one process
differs by 5e-4 with other local batches."""
SIGMOID: Options = {
    "module": "glm4_moe",
    "model__moe__bias_rate": 0.04,
    "model__moe__penalties__sequence_loss": 0.3,
}
"""A model with a sigmoid router whose selection bias balances, groups of experts, a shared expert
and a dense layer."""
LATENTS: Options = {
    "module": "deepseek_v3",
    "model__moe__bias_rate": 0.05,
    "model__moe__penalties__sequence_loss": 0.3,
}
"""The same with latent attention, whose values are narrower than keys, and RoPE in the last part of
each head."""
SPARSE: Options = {
    **LATENTS,
    "config": "deepseek_v3_sparse_debugmodel",
    "model__index_topk": 12,
}
"""The same with an indexer, which chooses fewer tokens than most documents have."""
SHARED_CHOICES: Options = {
    **SPARSE,
    "model__index_interleave": True,
    "model__indexer_types": ["full", "shared"],
}
"""The same, where every second layer sees the tokens that the layer before it chooses."""
GROWING_QUERIES: Options = {
    **LATENTS,
    "config": "deepseek_v3_mistral4_debugmodel",
    "model__rope__original_max_seq_len": 12,
    "model__moe__bias_rate": 0.0,
}
"""Latent attention whose queries grow with their position, and a softmax router."""
FURTHER_TOKENS: Options = {
    **LATENTS,
    "model__n_mtp_modules": 2,
    "model__moe__penalties__batch_loss": 0.3,
}
"""The same with multi-token prediction, by modules with experts and penalties of their own."""
SINKS: Options = {"module": "gpt_oss", "model__sliding_window": 12}
"""Attention sinks, windows in every second layer, and experts with biases."""
CHUNKS: Options = {"module": "llama4", "model__sliding_window": 12, "model__floor_scale": 8}
"""Chunks of documents in three of four layers, and queries that grow with their position in the
fourth."""
NETS_AND_EXPERTS: Options = {
    "module": "qwen3_5",
    "config": "qwen3_5_moe_debugmodel",
    "model__norm_eps": 1e-2,
}
"""Gated delta nets and experts."""
KIMI: Options = {"module": "kimi_linear", "model__norm_eps": 1e-2}
"""Kimi Delta Attention, latent attention without positions, and experts."""
REVERSING_NETS: Options = {"module": "olmo_hybrid"}
"""Gated delta nets whose tokens may reverse what a state returns, norms before their blocks, and
norms after attention's."""
FUSED_NETS: Options = {"module": "qwen3_next", "model__norm_eps": 1e-2}
"""Gated delta nets with projections fused by groups of heads, and experts."""
SHORT_CONVS: Options = {"module": "lfm2", **TIED}
"""Short convolutions in three of four layers, and tied embeddings."""
CONVS_AND_EXPERTS: Options = {"module": "lfm2", "config": "lfm2_moe_debugmodel"}
"""Short convolutions, dense layers first, and experts with a sigmoid router."""
MAMBA: Options = {"module": "nemotron_h", "config": "nemotron_h_moe_debugmodel"}
"""Layers of one part each: Mamba 2, experts, Mamba 2, attention."""
ONE_GROUP: Options = {
    "module": "granite",
    "config": "granite_hybrid_debugmodel",
    "model__mamba__n_groups": 1,
}
"""Mamba 2 whose heads share their keys and queries."""

_IMAGES: Options = {
    "module": "flow_matching",
    "training__seq_len": 1,
    "loss__chunk_tokens": ABSENT,
    "model__ffn_dim": ABSENT,
    "dataloader__dataset": "training",
    "validator__dataset": "validation",
    "training__max_norm": 1.0,
}
FLUX: Options = {**_IMAGES, "config": "flux_debugmodel", "model__n_layers": ABSENT}
"""Image generation: blocks with separate weights for text and image, then blocks with the same."""
DIT: Options = {**_IMAGES, "config": "dit_debugmodel"}
"""Image generation with classes."""

DDP2: Options = {
    "parallelism__data_parallel_replicate_degree": 2,
    "parallelism__data_parallel_shard_degree": 1,
}
HSDP: Options = {
    "parallelism__data_parallel_replicate_degree": 2,
    "parallelism__data_parallel_shard_degree": 2,
}
TP2: Options = {"parallelism__tensor_parallel_degree": 2}
TP4: Options = {"parallelism__tensor_parallel_degree": 4}
EP2: Options = {"parallelism__expert_parallel_degree": 2}
EP4: Options = {"parallelism__expert_parallel_degree": 4}
ETP2: Options = {"parallelism__expert_tensor_parallel_degree": 2}
CP2: Options = {"parallelism__context_parallel_degree": 2}
CP4: Options = {"parallelism__context_parallel_degree": 4}
PP2: Options = {"parallelism__pipeline_parallel_degree": 2}
PP4: Options = {"parallelism__pipeline_parallel_degree": 4}
PAIRS: Options = {"parallelism__pipeline_parallel_microbatch_size": 2}
CONTIGUOUS: Options = {"parallelism__context_parallel_load_balancer": "none"}
WHOLE_LOGITS: Options = {"parallelism__disable_loss_parallel": True}
ALWAYS: Options = {"parallelism__fsdp_reshard_after_forward": "always"}
NEVER: Options = {"parallelism__fsdp_reshard_after_forward": "never"}

FULL_AC: Options = {"activation_checkpoint__mode": "full"}
OP_AC: Options = {"activation_checkpoint__mode": "selective"}
SECOND_AC: Options = {**OP_AC, "activation_checkpoint__selective_option": "2"}
COMPILED: Options = {"compile__enable": True, "compile__backend": "aot_eager"}
INDUCTOR: Options = {"compile__enable": True}
BUDGET_AC: Options = {"activation_checkpoint__mode": "memory_budget", **COMPILED}
OFFLOAD: Options = {"training__enable_cpu_offload": True}
UNCLIPPED: Options = {"training__max_norm": float("inf")}
EARLY_STEP: Options = {"optimizer__early_step_in_backward": True, **UNCLIPPED}

LONG_ROPE: Options = {
    "module": "phi3",
    "model__sliding_window": None,
    "model__rope__original_max_seq_len": 24,
    "model__rope__short_factors": [1.0, 1.1, 1.2],
    "model__rope__long_factors": [1.5, 3.0, 6.0],
}
"""Frequencies that depend on the length of a document, which some ranks do not have entirely; 3/4
of a head is rotated."""
SOFT_CAPS: Options = {
    "module": "gemma",
    "config": "gemma2_debugmodel",
    "model__sliding_window": 12,
    **TIED,
}
"""Soft caps of scores and logits, norms times 1 + weight on both sides, windows in every second
layer, tied."""
LOCAL_ROPE: Options = {
    "module": "gemma",
    "model__sliding_window": 12,
    "model__tie_embeddings": False,
}
"""Another RoPE in layers with windows, and norms of queries and keys."""
WIDE_NORMS: Options = {"module": "olmo", "model__sliding_window": 12}
"""Norms after each part of a block, and norms over all heads of queries and keys."""
MULTIPLIERS: Options = {"module": "granite"}
"""Multipliers of the embedding, the residual stream, scores and logits."""
NORMS_AFTER_ROPE: Options = {"module": "hunyuan", "model__tie_embeddings": False}
"""Norms of queries and keys after RoPE."""
NO_POSITIONS: Options = {"module": "smollm3"}
"""Every fourth layer has no positions."""
BOTH_NORMS: Options = {"module": "glm4"}
"""Norms before and after each part of a block, biases, and half of a head rotated."""

MIXED_HEADS: Options = {"module": "gemma4", "model__sliding_window": 12, **TIED}
"""Wider and fewer heads in every second layer, whose values are its keys, norms of values, and
proportional RoPE."""

SHARED_KEYS: Options = {**MIXED_HEADS, "config": "gemma4_small_debugmodel"}
"""Per-layer embeddings; the second half of the layers has keys and values of the first, and wider
networks."""
DENSE_AND_EXPERTS: Options = {**MIXED_HEADS, "config": "gemma4_moe_debugmodel", **PENALTIES}
"""Experts next to a dense network in each layer, with norms and a router of their own."""


def local_batch(size: int) -> Options:
    """Return options for a local batch of `size` samples."""
    return {"training__local_batch_size": size}


def schedule(name: str) -> Options:
    """Return options for a pipeline schedule."""
    return {"parallelism__pipeline_parallel_schedule": name}


SINGLE_SCHEDULES = ("GPipe", "1F1B")
SPLIT_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute gradients of inputs and weights at different times."""
SCHEDULES = (*SINGLE_SCHEDULES, "Interleaved1F1B", "LoopedBFS", *SPLIT_SCHEDULES)

TWO_PROCESSES: dict[str, Options] = {
    "FSDP 2": {},
    "FSDP 2, AdamW": ADAMW,
    "FSDP 2, reshard always": ALWAYS,
    "FSDP 2, reshard never": NEVER,
    "FSDP 2, tied embeddings": TIED,
    "FSDP 2, AC full": FULL_AC,
    "FSDP 2, AC selective op": OP_AC,
    "FSDP 2, AC every second layer": SECOND_AC,
    "FSDP 2, compile": COMPILED,
    "FSDP 2, compile, AC memory budget": BUDGET_AC,
    "FSDP 2, CPU offload": OFFLOAD,
    "FSDP 2, CPU offload, AdamW": {**OFFLOAD, **ADAMW},
    "FSDP 2, step in backward": {**EARLY_STEP, **local_batch(8)},
    "FSDP 2, step in backward, AdamW": {**EARLY_STEP, **local_batch(8), **ADAMW},
    "DDP 2": DDP2,
    "DDP 2, tied embeddings": {**DDP2, **TIED},
    "TP 2": TP2,
    "TP 2, AdamW": {**TP2, **ADAMW},
    "TP 2, whole logits": {**TP2, **WHOLE_LOGITS},
    "TP 2, tied embeddings": {**TP2, **TIED},
    "TP 2, tied embeddings, whole logits": {**TP2, **TIED, **WHOLE_LOGITS},
    "TP 2, uneven vocabulary": {**TP2, **UNEVEN_VOCABULARY},
    "TP 2, loss not chunked": {**TP2, "loss__chunk_tokens": 0},
    "TP 2, one text without documents": {**TP2, **NO_DOCUMENTS},
    "TP 2, AC full": {**TP2, **FULL_AC},
    "TP 2, AC selective op": {**TP2, **OP_AC},
    "TP 2, AC every second layer": {**TP2, **SECOND_AC},
    "TP 2, compile": {**TP2, **COMPILED},
    "TP 2, step in backward": {**TP2, **EARLY_STEP, **local_batch(16)},
    "TP 2, Qwen3": {**TP2, **QWEN3},
    "TP 2, Qwen3, AdamW, AC full": {**TP2, **QWEN3, **ADAMW, **FULL_AC},
    "TP 2, Qwen3, compile": {**TP2, **QWEN3, **COMPILED},
    "FSDP 2, Qwen3": QWEN3,
    "CP 2, Qwen3": {**CP2, **QWEN3},
    "FSDP 2, FLUX, compile": {**FLUX, **COMPILED},
    "TP 2, FLUX": {**TP2, **FLUX},
    "TP 2, FLUX, AC full": {**TP2, **FLUX, **FULL_AC},
    "TP 2, FLUX, compile": {**TP2, **FLUX, **COMPILED},
    "CP 2, FLUX": {**CP2, **FLUX},
    "CP 2, FLUX, AC selective op": {**CP2, **FLUX, **OP_AC},
    "CP 2, FLUX, compile": {**CP2, **FLUX, **COMPILED},
    "TP 2, DiT, AC selective op": {**TP2, **DIT, **OP_AC},
    "TP 2, DiT, compile": {**TP2, **DIT, **COMPILED},
    "CP 2, DiT, compile, AC full": {**CP2, **DIT, **COMPILED, **FULL_AC},
    "PP 2 1F1B, Qwen3": {**PP2, **QWEN3},
    "FSDP 2, soft caps": SOFT_CAPS,
    "TP 2, soft caps": {**TP2, **SOFT_CAPS},
    "TP 2, soft caps, whole logits": {**TP2, **SOFT_CAPS, **WHOLE_LOGITS},
    "CP 2, soft caps": {**CP2, **SOFT_CAPS},
    "PP 2 1F1B, soft caps": {**PP2, **SOFT_CAPS},
    "TP 2, local RoPE": {**TP2, **LOCAL_ROPE},
    "CP 2, local RoPE": {**CP2, **LOCAL_ROPE},
    "PP 2 1F1B, local RoPE": {**PP2, **LOCAL_ROPE},
    "TP 2, norms over all heads": {**TP2, **WIDE_NORMS},
    "CP 2, norms over all heads": {**CP2, **WIDE_NORMS},
    "FSDP 2, heads of two widths": MIXED_HEADS,
    "TP 2, heads of two widths, compile": {**TP2, **MIXED_HEADS, **COMPILED},
    "CP 2, heads of two widths": {**CP2, **MIXED_HEADS},
    "PP 2 1F1B, heads of two widths": {**PP2, **MIXED_HEADS},
    "FSDP 2, shared keys": SHARED_KEYS,
    "FSDP 2, shared keys, AC full": {**SHARED_KEYS, **FULL_AC},
    "FSDP 2, shared keys, AC selective op, compile": {**SHARED_KEYS, **OP_AC, **COMPILED},
    "TP 2, shared keys": {**TP2, **SHARED_KEYS},
    "TP 2, shared keys, compile": {**TP2, **SHARED_KEYS, **COMPILED},
    "CP 2, shared keys": {**CP2, **SHARED_KEYS},
    "FSDP 2, dense networks and experts": DENSE_AND_EXPERTS,
    "TP 2, dense networks and experts": {**TP2, **DENSE_AND_EXPERTS},
    "CP 2, dense networks and experts": {**CP2, **DENSE_AND_EXPERTS},
    "EP 2, dense networks and experts": {**EP2, **DENSE_AND_EXPERTS},
    "PP 2 1F1B, dense networks and experts": {**PP2, **DENSE_AND_EXPERTS},
    "TP 2, multipliers": {**TP2, **MULTIPLIERS},
    "PP 2 1F1B, multipliers": {**PP2, **MULTIPLIERS},
    "TP 2, norms after RoPE": {**TP2, **NORMS_AFTER_ROPE},
    "CP 2, norms after RoPE": {**CP2, **NORMS_AFTER_ROPE},
    "TP 2, layers without positions": {**TP2, **NO_POSITIONS},
    "CP 2, layers without positions": {**CP2, **NO_POSITIONS},
    "FSDP 2, windows": WINDOWS,
    "TP 2, windows, compile": {**TP2, **WINDOWS, **COMPILED},
    "CP 2, windows": {**CP2, **WINDOWS},
    "CP 2, contiguous, windows": {**CP2, **CONTIGUOUS, **WINDOWS},
    "PP 2 1F1B, windows": {**PP2, **WINDOWS},
    "FSDP 2, delta nets": DELTA_NETS,
    "FSDP 2, delta nets, compile, AC full": {**DELTA_NETS, **COMPILED, **FULL_AC},
    "TP 2, delta nets": {**TP2, **DELTA_NETS},
    "TP 2, delta nets, compile": {**TP2, **DELTA_NETS, **COMPILED},
    "CP 2, delta nets": {**CP2, **DELTA_NETS},
    "CP 2, contiguous, delta nets, one text without documents": {
        **CP2,
        **CONTIGUOUS,
        **DELTA_NETS,
        **NO_DOCUMENTS,
    },
    "CP 2, delta nets, compile": {**CP2, **DELTA_NETS, **COMPILED},
    "PP 2 1F1B, delta nets": {**PP2, **DELTA_NETS},
    "FSDP 2, short convolutions": SHORT_CONVS,
    "TP 2, short convolutions": {**TP2, **SHORT_CONVS},
    "CP 2, short convolutions": {**CP2, **SHORT_CONVS},
    "PP 2 1F1B, short convolutions": {**PP2, **SHORT_CONVS},
    "FSDP 2, Mamba and experts": MAMBA,
    "TP 2, Mamba and experts": {**TP2, **MAMBA},
    "CP 2, Mamba and experts": {**CP2, **MAMBA},
    "CP 2, contiguous, Mamba and experts": {**CP2, **CONTIGUOUS, **MAMBA},
    "EP 2, Mamba and experts": {**EP2, **MAMBA},
    "PP 2 1F1B, Mamba and experts": {**PP2, **MAMBA},
    "TP 2, one group of Mamba": {**TP2, **ONE_GROUP},
    "CP 2, one group of Mamba": {**CP2, **ONE_GROUP},
    "FSDP 2, class of transformers": CLASS,
    "DDP 2, class of transformers": {**DDP2, **CLASS},
    "TP 2, class of transformers": {**TP2, **CLASS},
    "FSDP 2, class of transformers, AC full": {**CLASS, **FULL_AC},
    "FSDP 2, class of transformers, AC every second layer": {**CLASS, **SECOND_AC},
    "FSDP 2, class of transformers, compile": {**CLASS, **COMPILED},
    "FSDP 2, class of transformers, CPU offload": {**CLASS, **OFFLOAD},
    "FSDP 2, class of transformers, step in backward": {**CLASS, **EARLY_STEP, **local_batch(8)},
    "FSDP 2, hybrid class of transformers": HYBRID_CLASS,
    "CP 2, class of transformers": {**CP2, **CLASS},
    "PP 2 1F1B, class of transformers": {**PP2, **CLASS},
    "PP 2 1F1B, hybrid class of transformers": {**PP2, **HYBRID_CLASS},
    "FSDP 2, hybrid class of transformers, AC full": {**HYBRID_CLASS, **FULL_AC},
    "FSDP 2, experts": EXPERTS,
    "FSDP 2, experts, AC full": {**EXPERTS, **FULL_AC},
    "FSDP 2, experts, AC selective op": {**EXPERTS, **OP_AC},
    "FSDP 2, experts, compile": {**EXPERTS, **COMPILED},
    "EP 2, experts": {**EP2, **EXPERTS},
    "EP 2, experts, AdamW": {**EP2, **EXPERTS, **ADAMW},
    "EP 2, experts, AC full": {**EP2, **EXPERTS, **FULL_AC},
    "EP 2, experts, AC selective op": {**EP2, **EXPERTS, **OP_AC},
    "EP 2, experts, compile": {**EP2, **EXPERTS, **COMPILED},
    "EP 2, experts, CPU offload": {**EP2, **EXPERTS, **OFFLOAD},
    "EP 2, experts, step in backward": {**EP2, **EXPERTS, **EARLY_STEP, **local_batch(8)},
    "EP 2, sigmoid router": {**EP2, **SIGMOID},
    "EP 2, sigmoid router, AC selective op": {**EP2, **SIGMOID, **OP_AC},
    "EP 2, latent attention": {**EP2, **LATENTS},
    "EP 2, sparse attention": {**EP2, **SPARSE},
    "EP 2, attention sinks": {**EP2, **SINKS},
    "EP 2, chunks": {**EP2, **CHUNKS},
    "TP 2 x EP 2, experts": {**TP2, **EP2, **EXPERTS},
    "TP 2 x EP 2, sigmoid router, AC selective op": {**TP2, **EP2, **SIGMOID, **OP_AC},
    "TP 2 x ETP 2, experts": {**TP2, **ETP2, **EXPERTS},
    "TP 2 x ETP 2, sigmoid router, AC full": {**TP2, **ETP2, **SIGMOID, **FULL_AC},
    "CP 2 x EP 2, experts": {**CP2, **EP2, **EXPERTS},
    "DDP 2, experts": {**DDP2, **EXPERTS},
    "TP 2, experts": {**TP2, **EXPERTS},
    "TP 2, experts, AC full": {**TP2, **EXPERTS, **FULL_AC},
    "CP 2, experts": {**CP2, **EXPERTS},
    "PP 2 1F1B, experts": {**PP2, **EXPERTS},
    "PP 2 ZBVZeroBubble, experts": {**PP2, **schedule("ZBVZeroBubble"), **EXPERTS},
    "FSDP 2, sigmoid router": SIGMOID,
    "FSDP 2, sigmoid router, AC full": {**SIGMOID, **FULL_AC},
    "TP 2, sigmoid router": {**TP2, **SIGMOID},
    "TP 2, sigmoid router, compile": {**TP2, **SIGMOID, **COMPILED},
    "CP 2, sigmoid router": {**CP2, **SIGMOID},
    "PP 2 1F1B, sigmoid router": {**PP2, **SIGMOID},
    "PP 2 DualPipeV, sigmoid router": {**PP2, **schedule("DualPipeV"), **SIGMOID},
    "FSDP 2, latent attention": LATENTS,
    "FSDP 2, latent attention, AC full": {**LATENTS, **FULL_AC},
    "FSDP 2, latent attention, AC selective op, compile": {**LATENTS, **OP_AC, **COMPILED},
    "TP 2, latent attention": {**TP2, **LATENTS},
    "TP 2, latent attention, compile": {**TP2, **LATENTS, **COMPILED},
    "TP 2, latent attention, no latent of queries": {**TP2, **LATENTS, "model__q_lora_rank": None},
    "FSDP 2, sparse attention, AC full": {**SPARSE, **FULL_AC},
    "TP 2, sparse attention": {**TP2, **SPARSE},
    "FSDP 2, shared choices, AC full": {**SHARED_CHOICES, **FULL_AC},
    "CP 2, sparse attention": {**CP2, **SPARSE},
    "PP 2 1F1B, sparse attention": {**PP2, **SPARSE},
    "TP 2, latent attention, growing queries": {**TP2, **GROWING_QUERIES},
    "CP 2, latent attention, growing queries": {**CP2, **GROWING_QUERIES},
    "FSDP 2, multi-token prediction": FURTHER_TOKENS,
    "TP 2, multi-token prediction": {**TP2, **FURTHER_TOKENS},
    "CP 2, latent attention": {**CP2, **LATENTS},
    "PP 2 1F1B, latent attention": {**PP2, **LATENTS},
    "FSDP 2, attention sinks": SINKS,
    "TP 2, attention sinks": {**TP2, **SINKS},
    "TP 2, attention sinks, compile": {**TP2, **SINKS, **COMPILED},
    "CP 2, attention sinks": {**CP2, **SINKS},
    "PP 2 1F1B, attention sinks": {**PP2, **SINKS},
    "FSDP 2, chunks": CHUNKS,
    "TP 2, chunks": {**TP2, **CHUNKS},
    "TP 2, chunks, compile": {**TP2, **CHUNKS, **COMPILED},
    "CP 2, chunks": {**CP2, **CHUNKS},
    "PP 2 1F1B, chunks": {**PP2, **CHUNKS},
    "FSDP 2, delta nets and experts": NETS_AND_EXPERTS,
    "EP 2, delta nets and experts": {**EP2, **NETS_AND_EXPERTS},
    "TP 2 x EP 2, delta nets and experts": {**TP2, **EP2, **NETS_AND_EXPERTS},
    "CP 2 x EP 2, delta nets and experts": {**CP2, **EP2, **NETS_AND_EXPERTS},
    "PP 2 1F1B, delta nets and experts": {**PP2, **NETS_AND_EXPERTS},
    "FSDP 2, Kimi Delta Attention": KIMI,
    "TP 2, Kimi Delta Attention": {**TP2, **KIMI},
    "CP 2, Kimi Delta Attention": {**CP2, **KIMI},
    "PP 2 1F1B, Kimi Delta Attention": {**PP2, **KIMI},
    "FSDP 2, reversing delta nets": REVERSING_NETS,
    "PP 2 1F1B, reversing delta nets": {**PP2, **REVERSING_NETS},
    "CP 2": CP2,
    "CP 2, AdamW": {**CP2, **ADAMW},
    "CP 2, contiguous": {**CP2, **CONTIGUOUS},
    "CP 2, one text without documents": {**CP2, **NO_DOCUMENTS},
    "CP 2, contiguous, one text without documents": {**CP2, **CONTIGUOUS, **NO_DOCUMENTS},
    "CP 2, AC full": {**CP2, **FULL_AC},
    "CP 2, AC selective op": {**CP2, **OP_AC},
    "CP 2, AC every second layer": {**CP2, **SECOND_AC},
    "CP 2, compile": {**CP2, **COMPILED},
    **{f"PP 2 {name}": {**PP2, **schedule(name)} for name in SCHEDULES},
    **{f"PP 2 {name}, pairs of samples": {**PP2, **schedule(name), **PAIRS} for name in SCHEDULES},
    "PP 2 1F1B, AdamW": {**PP2, **ADAMW},
    "PP 2 1F1B, uneven vocabulary": {**PP2, **UNEVEN_VOCABULARY},
    "PP 2 1F1B, one text without documents": {**PP2, **NO_DOCUMENTS},
    "PP 2 1F1B, compile": {**PP2, **COMPILED},
    "PP 2 1F1B, tied embeddings": {**PP2, **TIED},
    "PP 2 ZBVZeroBubble, tied embeddings": {**PP2, **schedule("ZBVZeroBubble"), **TIED},
    "PP 2 DualPipeV, tied embeddings, AdamW": {**PP2, **schedule("DualPipeV"), **TIED, **ADAMW},
    "PP 2 1F1B, stages by name": {
        **PP2,
        "parallelism__module_fqns_per_model_part": [
            "tok_embeddings,layers.0",
            "layers.1,layers.2,layers.3,head",
        ],
    },
    "PP 2 Interleaved1F1B, one layer per stage": {
        **PP2,
        **schedule("Interleaved1F1B"),
        "parallelism__pipeline_parallel_layers_per_stage": 1,
    },
    "PP 2 ZBVZeroBubble, AC full": {**PP2, **schedule("ZBVZeroBubble"), **FULL_AC},
    "PP 2 1F1B, AC selective op": {**PP2, **OP_AC},
    "PP 2 ZBVZeroBubble, AC selective op, compile": {
        **PP2,
        **schedule("ZBVZeroBubble"),
        **OP_AC,
        **COMPILED,
    },
    "PP 2 ZBVZeroBubble, compile": {**PP2, **schedule("ZBVZeroBubble"), **COMPILED},
    "FSDP 2, LongRoPE": LONG_ROPE,
    "TP 2, LongRoPE, compile": {**TP2, **LONG_ROPE, **COMPILED},
    "CP 2, LongRoPE": {**CP2, **LONG_ROPE},
    "PP 2 1F1B, LongRoPE": {**PP2, **LONG_ROPE},
    "FSDP 2, norms on both sides": BOTH_NORMS,
    "TP 2, norms on both sides": {**TP2, **BOTH_NORMS},
    "TP 2, norms on both sides, compile": {**TP2, **BOTH_NORMS, **COMPILED},
    "CP 2, norms on both sides": {**CP2, **BOTH_NORMS},
    "PP 2 1F1B, norms on both sides": {**PP2, **BOTH_NORMS},
}

FOUR_PROCESSES: dict[str, Options] = {
    "FSDP 4": {},
    "HSDP 2 x 2": HSDP,
    "HSDP 2 x 2, tied embeddings, AdamW": {**HSDP, **TIED, **ADAMW},
    "HSDP 2 x 2, shared keys": {**HSDP, **SHARED_KEYS},
    "FSDP 2 x TP 2, dense networks and experts": {**TP2, **DENSE_AND_EXPERTS},
    "TP 4": TP4,
    "TP 4, uneven vocabulary, AdamW": {**TP4, **UNEVEN_VOCABULARY, **ADAMW},
    "CP 4": CP4,
    "CP 4, contiguous": {**CP4, **CONTIGUOUS},
    "PP 4 1F1B": PP4,
    "PP 4 1F1B, tied embeddings": {**PP4, **TIED},
    "PP 4 ZBVZeroBubble, 12 layers": {**PP4, **schedule("ZBVZeroBubble"), **TWELVE_LAYERS},
    "FSDP 2 x TP 2": TP2,
    "FSDP 2 x TP 2, AdamW": {**TP2, **ADAMW},
    "FSDP 2 x TP 2, tied embeddings, uneven vocabulary": {**TP2, **TIED, **UNEVEN_VOCABULARY},
    "FSDP 2 x TP 2, reshard always": {**TP2, **ALWAYS},
    "FSDP 2 x TP 2, reshard never": {**TP2, **NEVER},
    "FSDP 2 x TP 2, AC full": {**TP2, **FULL_AC},
    "FSDP 2 x TP 2, CPU offload": {**TP2, **OFFLOAD},
    "FSDP 2 x TP 2, step in backward": {**TP2, **EARLY_STEP, **local_batch(8)},
    "DDP 2 x TP 2": {**DDP2, **TP2},
    "FSDP 2 x CP 2": CP2,
    "FSDP 2 x CP 2, AdamW": {**CP2, **ADAMW},
    "DDP 2 x CP 2": {**DDP2, **CP2},
    "TP 2 x CP 2": {**TP2, **CP2},
    "TP 2 x CP 2, soft caps": {**TP2, **CP2, **SOFT_CAPS},
    "FSDP 2 x TP 2, norms over all heads": {**TP2, **WIDE_NORMS},
    "TP 2 x CP 2, windows": {**TP2, **CP2, **WINDOWS},
    "TP 4, Qwen3": {**TP4, **QWEN3},
    "FSDP 2 x TP 2, Qwen3": {**TP2, **QWEN3},
    "TP 2 x CP 2, Qwen3": {**TP2, **CP2, **QWEN3},
    "PP 2 1F1B x TP 2, Qwen3": {**PP2, **TP2, **QWEN3},
    "HSDP 2 x 2, class of transformers": {**HSDP, **CLASS},
    "FSDP 2 x TP 2, class of transformers": {**TP2, **CLASS},
    "TP 2 x CP 2, class of transformers": {**TP2, **CP2, **CLASS},
    "PP 2 1F1B x TP 2, class of transformers": {**PP2, **TP2, **CLASS},
    "FSDP 2 x TP 2, experts": {**TP2, **EXPERTS},
    "EP 4, experts": {**EP4, **EXPERTS},
    "EP 4, sigmoid router, AC full": {**EP4, **SIGMOID, **FULL_AC},
    "FSDP 4 x EP 2, experts": {**EP2, **EXPERTS},
    "FSDP 4 x EP 2, three experts per rank": {**EP2, **EXPERTS, "model__moe__n_experts": 6},
    "FSDP 4 x EP 2, sigmoid router": {**EP2, **SIGMOID},
    "HSDP 2 x 2 x EP 2, experts": {**HSDP, **EP2, **EXPERTS},
    "FSDP 2 x TP 2 x EP 2, experts": {**TP2, **EP2, **EXPERTS},
    "FSDP 2 x TP 2 x EP 4, sigmoid router": {**TP2, **EP4, **SIGMOID},
    "FSDP 2 x TP 2 x ETP 2 x EP 2, experts": {**TP2, **ETP2, **EP2, **EXPERTS},
    "FSDP 2 x TP 2 x ETP 2, sigmoid router": {**TP2, **ETP2, **SIGMOID},
    "FSDP 2 x CP 2 x EP 4, sigmoid router": {**CP2, **EP4, **SIGMOID},
    "TP 4 x EP 2, experts": {**TP4, **EP2, **EXPERTS},
    "DDP 2 x TP 2 x EP 2, experts": {**DDP2, **TP2, **EP2, **EXPERTS},
    "PP 2 1F1B x EP 2, experts": {**PP2, **EP2, **EXPERTS},
    "PP 2 ZBVZeroBubble x EP 2, sigmoid router": {
        **PP2,
        **EP2,
        **schedule("ZBVZeroBubble"),
        **SIGMOID,
    },
    "TP 2 x CP 2, experts": {**TP2, **CP2, **EXPERTS},
    "PP 2 1F1B x FSDP 2, experts": {**PP2, **EXPERTS},
    "HSDP 2 x 2, experts": {**HSDP, **EXPERTS},
    "FSDP 2 x CP 2, sigmoid router": {**CP2, **SIGMOID},
    "PP 2 ZBVZeroBubble x TP 2, sigmoid router": {
        **PP2,
        **TP2,
        **schedule("ZBVZeroBubble"),
        **SIGMOID,
    },
    "TP 2 x CP 2, FLUX": {**TP2, **CP2, **FLUX},
    "HSDP 2 x 2, FLUX": {**HSDP, **FLUX},
    "FSDP 2 x TP 2, DiT": {**TP2, **DIT},
    "TP 2 x CP 2, latent attention": {**TP2, **CP2, **LATENTS},
    "TP 2 x CP 2, sparse attention": {**TP2, **CP2, **SPARSE},
    "TP 2 x CP 2, shared choices": {**TP2, **CP2, **SHARED_CHOICES},
    "TP 2 x CP 2, delta nets": {**TP2, **CP2, **DELTA_NETS},
    "TP 2 x CP 2, short convolutions": {**TP2, **CP2, **SHORT_CONVS},
    "TP 2 x CP 2, one group of Mamba": {**TP2, **CP2, **ONE_GROUP},
    "TP 2 x CP 2 x EP 2, Mamba and experts": {**TP2, **CP2, **EP2, **MAMBA},
    "TP 2 x CP 2 x EP 2, delta nets and experts": {**TP2, **CP2, **EP2, **NETS_AND_EXPERTS},
    "TP 2 x CP 2 x EP 2, Kimi Delta Attention": {**TP2, **CP2, **EP2, **KIMI},
    "TP 2 x CP 2, reversing delta nets": {**TP2, **CP2, **REVERSING_NETS},
    "TP 2 x CP 2 x EP 2, fused delta nets and experts": {**TP2, **CP2, **EP2, **FUSED_NETS},
    "TP 2 x CP 2 x EP 2, short convolutions and experts": {
        **TP2,
        **CP2,
        **EP2,
        **CONVS_AND_EXPERTS,
    },
    "TP 2 x CP 2 x EP 2, one group of Mamba and experts": {
        **TP2,
        **CP2,
        **EP2,
        **ONE_GROUP,
        "config": "granite_moe_debugmodel",
    },
    "PP 2 1F1B x TP 2, delta nets": {**PP2, **TP2, **DELTA_NETS},
    "TP 2 x CP 2, LongRoPE": {**TP2, **CP2, **LONG_ROPE},
    "TP 2 x CP 2, tied embeddings, AC full": {**TP2, **CP2, **TIED, **FULL_AC},
    **{f"PP 2 {name} x FSDP 2": {**PP2, **schedule(name)} for name in SCHEDULES},
    "PP 2 1F1B x FSDP 2, AdamW": {**PP2, **ADAMW},
    "PP 2 1F1B x FSDP 2, reshard always": {**PP2, **ALWAYS},
    "PP 2 1F1B x FSDP 2, AC full": {**PP2, **FULL_AC},
    "PP 2 1F1B x FSDP 2, AC selective op": {**PP2, **OP_AC},
    "PP 2 ZBVZeroBubble x FSDP 2, AC every second layer": {
        **PP2,
        **schedule("ZBVZeroBubble"),
        **SECOND_AC,
    },
    "PP 2 ZBVZeroBubble x FSDP 2, compile": {**PP2, **schedule("ZBVZeroBubble"), **COMPILED},
    "PP 2 1F1B x FSDP 2, CPU offload": {**PP2, **OFFLOAD},
    "PP 2 1F1B x FSDP 2, tied embeddings, AdamW": {**PP2, **TIED, **ADAMW},
    "PP 2 1F1B x FSDP 2, tied embeddings, CPU offload": {**PP2, **TIED, **OFFLOAD},
    "PP 2 ZBVZeroBubble x FSDP 2, tied embeddings": {**PP2, **schedule("ZBVZeroBubble"), **TIED},
    "PP 2 1F1B x DDP 2": {**PP2, **DDP2},
    "PP 2 DualPipeV x DDP 2": {**PP2, **DDP2, **schedule("DualPipeV")},
    **{f"PP 2 {name} x TP 2": {**PP2, **TP2, **schedule(name), **PAIRS} for name in SCHEDULES},
    "PP 2 1F1B x TP 2, uneven vocabulary, AdamW": {**PP2, **TP2, **UNEVEN_VOCABULARY, **ADAMW},
    "PP 2 1F1B x TP 2, whole logits": {**PP2, **TP2, **WHOLE_LOGITS},
    "PP 2 1F1B x TP 2, tied embeddings": {**PP2, **TP2, **TIED},
    "PP 2 ZBVZeroBubble x TP 2, tied embeddings, whole logits": {
        **PP2,
        **TP2,
        **schedule("ZBVZeroBubble"),
        **TIED,
        **WHOLE_LOGITS,
    },
    "PP 2 1F1B x CP 2, tied embeddings, uneven vocabulary": {
        **PP2,
        **CP2,
        **TIED,
        **UNEVEN_VOCABULARY,
    },
    **{
        f"PP 2 {name} x CP 2": {**PP2, **CP2, **schedule(name)}
        for name in ("1F1B", "LoopedBFS", *SPLIT_SCHEDULES)
    },
}

LONG: dict[str, tuple[int, Options]] = {
    "FSDP 2, compile with inductor": (2, INDUCTOR),
    "PP 2 ZBVZeroBubble, compile with inductor": (
        2,
        {**PP2, **schedule("ZBVZeroBubble"), **INDUCTOR},
    ),
    "HSDP 2 x 2 x TP 2": (8, {**HSDP, **TP2}),
    "PP 2 ZBVZeroBubble x FSDP 2 x TP 2": (8, {**PP2, **TP2, **schedule("ZBVZeroBubble")}),
}

REFUSED: dict[str, tuple[int, Options]] = {
    "PP 2 1F1B, step in backward": (2, {**PP2, **EARLY_STEP, **local_batch(16)}),
    "PP 2 ZBVZeroBubble, AC selective op": (2, {**PP2, **schedule("ZBVZeroBubble"), **OP_AC}),
    "FSDP 2, step in backward, accumulation": (2, {**EARLY_STEP, **local_batch(4)}),
    "DDP 2, CPU offload": (2, {**DDP2, **OFFLOAD}),
    "TP 2, CPU offload": (2, {**TP2, **OFFLOAD}),
    "TP 4, two key/value heads": (4, {**TP4, "model__n_kv_heads": 2}),
    "TP 4, two key heads of delta nets": (
        4,
        {**TP4, **DELTA_NETS, "model__linear_num_key_heads": 2},
    ),
    "CP 4, two key heads of delta nets": (
        4,
        {**CP4, **DELTA_NETS, "model__linear_num_key_heads": 2},
    ),
    "TP 4, two groups of Mamba": (4, {**TP4, **ONE_GROUP, "model__mamba__n_groups": 2}),
    "CP 4, two groups of Mamba": (4, {**CP4, **ONE_GROUP, "model__mamba__n_groups": 2}),
    "CP 2, hybrid class of transformers": (2, {**CP2, **HYBRID_CLASS}),
    "CP 2, multi-token prediction": (2, {**CP2, **FURTHER_TOKENS}),
    "PP 2 1F1B, multi-token prediction": (2, {**PP2, **FURTHER_TOKENS}),
    "TP 2, hybrid class of transformers": (2, {**TP2, **HYBRID_CLASS}),
}
"""Layouts that the configuration must reject, since PyTorch or the model sizes do not support
them."""


@dataclass(frozen=True)
class Layout:
    """One row of the matrix."""

    name: str
    processes: int
    chosen: Options
    """Options from the table."""
    refused: bool = False
    """True if the configuration must be rejected."""
    long: bool = False
    """True if only `--long` runs the layout."""

    @property
    def options(self) -> Options:
        """All options in addition to `PROBLEM`."""
        samples: int = PROBLEM["training__global_batch_size"]
        return {
            "training__local_batch_size": samples // _PASSES // self.data_parallel_degree,
            **self.chosen,
        }

    @property
    def reference_options(self) -> Options:
        """Options for the same computation in a single process: all except options of the
        layout."""
        computation = {
            name: value
            for name, value in self.chosen.items()
            if value == ABSENT
            or (name.partition("__")[0] not in _LAYOUT_SECTIONS and name not in _LAYOUT_OPTIONS)
        }
        return {"training__local_batch_size": 4, **computation}

    @property
    def data_parallel_degree(self) -> int:
        """Number of groups of ranks with different samples."""
        kinds = ("tensor", "context", "pipeline")
        return self.processes // prod(
            self.chosen.get(f"parallelism__{kind}_parallel_degree", 1) for kind in kinds
        )

    @property
    def in_two_stages(self) -> Collection[str]:
        """Names of the weights of which the first and the last pipeline stage have a copy."""
        if self.pipeline_degree == 1:
            return ()
        if self.chosen.get("module") == "transformers":
            return ("model.model.embed_tokens.weight",)
        return ("tok_embeddings.weight",) if self.chosen.get("model__tie_embeddings") else ()

    @property
    def pipeline_degree(self) -> int:
        """Number of pipeline stages."""
        degree: int = self.chosen.get("parallelism__pipeline_parallel_degree", 1)
        return degree


def all_layouts() -> Iterator[Layout]:
    """Yield the whole matrix, grouped by the number of processes."""
    for processes, table in ((2, TWO_PROCESSES), (4, FOUR_PROCESSES)):
        for name, options in table.items():
            yield Layout(name, processes, options)
    for name, (processes, options) in LONG.items():
        yield Layout(name, processes, options, long=True)
    for name, (processes, options) in REFUSED.items():
        yield Layout(name, processes, options, refused=True)

"""Compute a layer of routed experts, forward and backward, on the task in a folder: each step is
one pass over a batch.

All systems compute the block of a Qwen3-MoE layer (router, experts, weighted sum); see
`benchmarks/peers.py`."""

import sys
import time

import torch
from task import EXPERTS, StepLog, Task
from torch import nn

from torchtitan.tools.process import keep_freed_memory


def make_block(system: str) -> nn.Module:
    dim, hidden, n_experts, top_k = (
        EXPERTS[name] for name in ("dim", "hidden_dim", "n_experts", "top_k")
    )
    if system == "torchtitan":
        from torchtitan.models.common.moe.experts import RoutedExperts
        from torchtitan.models.common.moe.layer import MixtureOfExperts
        from torchtitan.models.common.moe.router import Router, RoutingConfig

        stds = {"init_std": 0.02, "out_init_std": 0.02}
        router = Router(RoutingConfig(n_experts=n_experts, top_k=top_k), dim=dim, init_std=0.02)
        return MixtureOfExperts(
            router,
            RoutedExperts(n_experts=n_experts, top_k=top_k, dim=dim, hidden_dim=hidden, **stds),
        )
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": dim, "moe_intermediate_size": hidden, "num_experts": n_experts}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=top_k, norm_topk_prob=True)
    config._experts_implementation = system
    return Qwen3MoeSparseMoeBlock(config)


def main(folder: str, system: str) -> None:
    task, log = Task.read(folder), StepLog(folder)
    torch.manual_seed(0)
    if system == "torchtitan":
        keep_freed_memory()  # as in training
    block, dtype = make_block(system), getattr(torch, task.precision)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    block = block.to(dtype)
    x_BLD = (
        torch.randn(1, task.batch_size * task.seq_len, EXPERTS["dim"]).to(dtype).requires_grad_()
    )
    for _ in range(task.steps):
        x_BLD.grad = None
        block.zero_grad()  # as at the first micro-batch of a step
        out_BLD = block(x_BLD)
        out_BLD.backward(torch.ones_like(out_BLD))
        log.end_step(time.monotonic(), x_BLD.shape[1], x_BLD.shape[1])


if __name__ == "__main__":
    main(*sys.argv[1:])

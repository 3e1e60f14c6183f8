"""Expert parallelism: experts without tokens, low precision, generation, and a dry run's traffic.
`tests/equivalence` compares whole runs."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.training import read_metrics, run, tiny_config
from torchtitan.cli.main import main
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.generation import generate
from torchtitan.components.peft.experts import adapt_experts
from torchtitan.config import TrainingConfig
from torchtitan.distributed import ParallelDims, initialize_weights
from torchtitan.distributed.expert_parallel import apply_expert_parallel
from torchtitan.distributed.parallelize import parallelize_model
from torchtitan.dry_run import dry_run
from torchtitan.models.common.decoder import DENSE_SHARDING
from torchtitan.models.common.moe.experts import InputScaledExperts, RoutedExperts
from torchtitan.models.qwen3_moe import model_registry
from torchtitan.tools.errors import UserError

N_EXPERTS, TOP_K, DIM, WIDTH, TOKENS = 4, 2, 16, 8, 6


def make_experts(
    kind: type[RoutedExperts], dtype: torch.dtype, adapter: str | None
) -> RoutedExperts:
    torch.manual_seed(0)
    sizes = {"n_experts": N_EXPERTS, "top_k": TOP_K, "dim": DIM, "hidden_dim": WIDTH}
    biased = type(kind.__name__, (kind,), {"has_bias": True})
    experts = biased(**sizes, init_std=1.0, out_init_std=1.0)
    if adapter:
        ranks, scalings = dict.fromkeys(experts.matrices, 3), dict.fromkeys(experts.matrices, 1.5)
        adapt_experts(experts, ranks=ranks, scalings=scalings, dora=adapter == "dora")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts.to(dtype)


def make_tokens(rank: int, busy: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank + 1)
    x_ND = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weights_NK = torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_()
    choices = torch.tensor(list(itertools.permutations(busy, TOP_K)))
    return x_ND, weights_NK, choices[torch.randint(len(choices), (TOKENS,), generator=generator)]


def compare_with_all_experts(
    kind: type[RoutedExperts],
    busy_of_rank: list[list[int]],
    dtype: torch.dtype,
    device_type: str | None,
    tp: int,
    adapter: str | None = None,
) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims(
        world_size=world_size, dp_shard=world_size // tp, tp=tp, ep=world_size // tp, etp=tp
    )
    batches = [make_tokens(each, busy, dtype) for each, busy in enumerate(busy_of_rank)]
    whole = make_experts(kind, dtype, adapter)
    results = [whole(*batch) for batch in batches]
    sum(result.float().square().sum() for result in results).backward()
    experts = make_experts(kind, dtype, adapter)
    experts.device_type = whole.device_type = device_type or whole.device_type
    apply_expert_parallel([experts], dims.expert_mesh(dims.build_mesh("cpu")), gradient_degree=1)
    x_ND, weights_NK, chosen_NK = make_tokens(rank, busy_of_rank[rank], dtype)
    result = experts(x_ND, weights_NK, chosen_NK)
    result.float().square().sum().backward()
    # In bfloat16, with its 8 bits, sums in another order differ in the last bit.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.3}
    torch.testing.assert_close(result, results[rank], **close)
    torch.testing.assert_close(x_ND.grad, batches[rank][0].grad, **close)
    torch.testing.assert_close(weights_NK.grad, batches[rank][1].grad, **close)
    for (name, parameter), expected in zip(
        experts.named_parameters(), whole.parameters(), strict=True
    ):
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad.redistribute(placements=parameter.placements).full_tensor()
        # Sums over many rows cancel: relative to the largest.
        atol = close["atol"] * max(1.0, expected.grad.abs().max().item())
        torch.testing.assert_close(
            gradient,
            expected.grad,
            **{**close, "atol": atol},
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    ("kind", "busy_of_rank", "dtype", "device_type", "tp", "adapter"),
    [
        (RoutedExperts, [[0, 1, 2, 3], [0, 3]], torch.float32, None, 1, None),
        (RoutedExperts, [[0, 1], [0, 1]], torch.float32, None, 1, None),  # rank 1 gets no rows
        # rank 0 gets none; grouped products
        (RoutedExperts, [[2, 3], [2, 3]], torch.float32, "cuda", 1, None),
        (InputScaledExperts, [[0, 1, 2], [1, 3]], torch.bfloat16, None, 1, None),
        (RoutedExperts, [[0, 1, 2], [1, 3]], torch.float32, None, 2, None),
        (RoutedExperts, [[0, 1], [0, 1]], torch.float32, None, 1, "dora"),
        (InputScaledExperts, [[0, 1, 2], [1, 3]], torch.float32, None, 2, "lora"),
        (RoutedExperts, [[0, 1, 2], [1, 3]], torch.float32, None, 2, "dora"),
    ],
)
def test_ranks_compute_the_results_of_all_experts(
    workers, kind, busy_of_rank, dtype, device_type, tp, adapter
):
    workers.run(compare_with_all_experts, kind, busy_of_rank, dtype, device_type, tp, adapter)


def sharded_generations(prompts: list[list[int]], expected: list[list[int]]) -> None:
    dims = ParallelDims(world_size=2, dp_shard=2, ep=2)
    config = model_registry("debugmodel").model
    config.vocab_size = 99
    training = TrainingConfig(mixed_precision_param="float32")
    model = config.build()
    parallelize_model(
        model,
        parallel_dims=dims,
        mesh=dims.build_mesh("cpu"),
        sharding=DENSE_SHARDING,
        training=training,
    )
    initialize_weights(model, 0)
    own = [0] if dist.get_rank() == 0 else [1, 2]
    pushed = itertools.count(1)
    found = generate(
        model,
        [prompts[i] for i in own],
        max_new_tokens=7,
        # rank 0 has fewer prompts, and ends early
        on_token=lambda row, token: own == [0] and next(pushed) == 3,
        group=dist.group.WORLD,
    )
    assert [generation.ids for generation in found] == [expected[i][: 7 if i else 3] for i in own]


@pytest.mark.slow
def test_ranks_generate_together(workers):
    config = model_registry("debugmodel").model
    config.vocab_size = 99
    model = config.build()
    initialize_weights(model, 0)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    expected = [generation.ids for generation in generate(model, prompts, max_new_tokens=7)]
    workers.run(sharded_generations, prompts, expected)


RUN = {
    "training__global_batch_size": 4,
    "training__mixed_precision_param": "float32",
    "optimizer__lr": 0.003,
}
EXPORT = {
    "checkpoint__enable": True,
    "checkpoint__last_save_in_hf": True,
    "checkpoint__export_dtype": "float32",
}
CONVERSATIONS = {"training__seq_len": 128, "training__local_batch_size": 1}


def train_family(folder: Path, module: str, options: dict[str, Any]) -> Any:
    """Train in the processes of the caller, on packed conversations with their options."""
    config = tiny_config(folder, module=module, **RUN, **options)
    if options.items() >= CONVERSATIONS.items():
        config.dataloader = SFTDataLoader.Config(dataset=["chats"], chat_template="alpaca")
    return run(config)


def train_divided(folder: Path, module: str, options: dict[str, Any]) -> None:
    train_family(folder, module, {**options, "parallelism__expert_parallel_degree": 2})


@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param("llama4", {"checkpoint__enable": True}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", EXPORT, marks=pytest.mark.slow),
        ("deepseek_v3", {**EXPORT, **CONVERSATIONS}),
    ],
)
def test_runs_with_divided_experts_and_their_exports_equal_one_process(
    workers, tmp_path, module, options
):
    """Transformers opens the export, which is written by the run, or else by `torchtitan
    convert`."""
    transformers = pytest.importorskip("transformers")
    workers.run(train_divided, tmp_path / "divided", module, options)
    others = {name: value for name, value in options.items() if not name.startswith("checkpoint")}
    trainer = train_family(tmp_path / "one", module, others)
    divided, one = (
        read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("divided", "one")
    )
    # Float32 sums in another order.
    assert divided == [pytest.approx(line, rel=1e-5) for line in one]
    (export,) = (tmp_path / "divided" / "checkpoint").glob("step-4")
    if "checkpoint__last_save_in_hf" not in options:
        assert (
            main(
                [
                    "convert",
                    str(export),
                    str(export := tmp_path / "hf"),
                    "--to",
                    "hf",
                    "--export_dtype",
                    "float32",
                ]
            )
            == 0
        )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    model, tokens = trainer.model_parts[0].eval(), torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected, found = model(tokens), theirs(tokens).logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_ranks_that_cannot_shard_the_same_experts_are_refused(tmp_path):
    """Three of six ranks have 16 experts each, and divide the widths of the second case."""
    options = {
        "module": "qwen3_moe",
        "parallelism__expert_parallel_degree": 2,
        "training__local_batch_size": 2,
    }
    with pytest.raises(
        UserError,
        match=r"leaves 3 ranks for the same experts.* their weights \[16, 2, 64, 64\]; set",
    ):
        dry_run(tiny_config(tmp_path / "refused", **options, model__moe__ffn_dim=64), 6)
    sizes = {"model__moe__ffn_dim": 48, "model__dim": 96}
    dry_run(tiny_config(tmp_path / "fine", **options, **sizes), 6)


@pytest.mark.parametrize(("mode", "exchanges"), [("none", 7), ("selective", 7), ("full", 11)])
def test_traffic_of_a_dry_run(tmp_path, mode, exchanges):
    """A layer exchanges counts, tokens, weights and results, and the gradients of the last three;
    full activation checkpointing repeats the first four, but selective does not."""
    options = {"module": "qwen3_moe", "parallelism__expert_parallel_degree": 4}
    options["model__moe__penalties__batch_loss"] = 0.0  # otherwise, a further forward pass counts
    config = tiny_config(tmp_path, **options, activation_checkpoint__mode=mode)
    (report,) = dry_run(config, 8)
    (traffic,) = [each for each in report.communication if each.kind == "all-to-all"]
    n_layers, n_experts, rows, dim = 2, 32, 2 * 32 * 4, 64
    assert traffic.calls == exchanges * n_layers
    times = {"none": 1, "selective": 1, "full": 2}[mode]
    elements = (times + 1) * rows * (2 * dim + 1) + times * n_experts
    assert traffic.n_bytes == n_layers * 4 * elements

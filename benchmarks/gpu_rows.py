"""The rows of `gpu.py`: what each measures.

Training rows take steps on the built-in texts with random weights, the published sizes, and AdamW
in float32 under bfloat16. Speed is measured over the steps after the warm-up, with the device
synchronized before and after; MFU is relative to the published peak. At toy size the numbers mean
nothing.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.optim.kinds import KINDS
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.narrow import MXFP8, NVFP4
from torchtitan.config import CompileConfig
from torchtitan.models.common.recipes import small_run, with_adapters
from torchtitan.models.llama3 import FORMAT, model_registry
from torchtitan.tools.device import device_type, memory_gib, peak_flops, synchronize

ROOT = Path(__file__).resolve().parent.parent
CUDA_TESTS = [
    "tests/components/generation/test_decode_graph.py",
    "tests/components/optim/test_optimizer.py",
    "tests/components/observe/test_profiling.py",
    "tests/models/test_attention.py",
    "tests/models/test_llama3.py",
]

Numbers = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the rows, on a GPU or at toy size."""

    toy: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.toy else device_type())

    def pretraining(self, *, packed: bool = False, **options: bool) -> Any:
        """Return a run of Llama 3.2 1B on 4 windows of 2,048 tokens; `packed` windows hold many
        documents."""
        config = small_run(model_registry("debugmodel" if self.toy else "1B"))
        config.dataloader = PretrainDataLoader.Config(document_mask=packed)
        config.training.seq_len, config.training.local_batch_size = (
            (64, 2) if self.toy else (2048, 4)
        )
        config.training.mixed_precision_param = "float32" if self.toy else "bfloat16"
        return self._with(config, **options)

    def adapters(self, converter: Any, **options: bool) -> Any:
        """Return a fine-tuning run of Llama 3.1 8B with adapters, on one window of 4,096 tokens."""
        config = self.pretraining()
        config.model_spec = model_registry("debugmodel" if self.toy else "8B")
        config.dataloader = SFTDataLoader.Config(chat_template="alpaca")
        config.training.seq_len, config.training.local_batch_size = (
            (512, 1) if self.toy else (4096, 1)
        )
        return self._with(with_adapters(config, converter), **options)

    def _with(self, config: Any, *, selective: bool = False, compiled: bool = False) -> Any:
        config.validator.enable = False
        if selective:
            config.activation_checkpoint.mode = "selective"
        if compiled:
            config.compile = CompileConfig(
                enable=True, backend="aot_eager" if self.toy else "inductor"
            )
        return config

    @property
    def steps(self) -> int:
        return 2 if self.toy else 8

    @property
    def warm_up(self) -> int:
        return 1 if self.toy else 3


def train(size: Size, config: Any, around_step: Callable[[int], Any] | None = None) -> Numbers:
    """Train; return speed, memory and seconds to the first step. `around_step` gives a context
    manager for a step."""
    marks: dict[int, float] = {}
    saves: dict[int, float] = {}

    class Timed(config._owner):  # type: ignore[name-defined,misc]
        """Marks the time of the first and of the timed steps, and of saves."""

        def train_step(self, batches: Any) -> Any:
            if self.step in (1, size.warm_up):
                synchronize(self.device)
                marks[self.step] = time.perf_counter()
            with around_step(self.step + 1) if around_step else contextlib.nullcontext():
                return super().train_step(batches)

        def finish(self, reason: Any) -> None:
            synchronize(self.device)
            marks[self.step] = time.perf_counter()
            super().finish(reason)

    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder, config.training.steps = folder, size.warm_up + size.steps
        config.metrics.log_freq = config.training.steps
        started = time.perf_counter()
        trainer = Timed(config)
        if config.checkpoint.enable:
            save = trainer.checkpointer.save

            def timed_save(step: int, **options: Any) -> None:
                synchronize(trainer.device)
                start = time.perf_counter()
                save(step, **options)
                saves[step] = time.perf_counter() - start

            trainer.checkpointer.save = timed_save  # type: ignore[method-assign]
        trainer.train()
        trainer.close()
    saving = sum(
        taken for step, taken in saves.items() if size.warm_up < step < config.training.steps
    )
    seconds = (marks[config.training.steps] - marks[size.warm_up] - saving) / size.steps
    speed = trainer.tokens_per_step / seconds
    peak = peak_flops(trainer.device, trainer.metrics.compute_dtype)
    return {
        "tokens_per_second": speed,
        "mfu": 100 * speed * trainer.flops_per_token / peak.value,
        "step_seconds": seconds,
        "first_step_seconds": marks[1] - started,
        "memory_gib": memory_gib(trainer.device),
        **({"save_seconds": saves} if saves else {}),
    }


def profiled(size: Size) -> Numbers:
    """Profile one step: time by class of kernel, the time in which no kernel ran, and waits for the
    device."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if not size.toy:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(activities=kinds)

    @contextlib.contextmanager
    def around_step(step: int) -> Iterator[None]:
        if step != size.warm_up + 1:
            yield
            return
        with profile:
            yield
            synchronize(size.device)

    train(size, size.pretraining(compiled=True), around_step)
    events = list(profile.events())
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    seconds: dict[str, float] = defaultdict(float)
    for event in on_device or events:
        taken = event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
        seconds[kernel_class(event.name)] += taken / 1e6
    gaps, end = 0.0, None
    for event in sorted(on_device, key=lambda e: e.time_range.start):
        gaps += max(0.0, event.time_range.start - end) / 1e6 if end is not None else 0.0
        end = max(event.time_range.end, end or 0.0)
    waits = [e for e in events if "Synchronize" in e.name or e.name == "aten::_local_scalar_dense"]
    return {"seconds": seconds, "gap_seconds": gaps, "waits": len(waits)}


def kernel_class(name: str) -> str:
    """Return the class of a kernel or, without a GPU, of an operation."""
    lowered = name.lower()
    words = {
        "communication": ("nccl", "all_reduce", "all_gather"),
        "attention": ("flash", "fmha", "attention", "flex"),
        "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "::mm", "::addmm", "::bmm"),
        "optimizer": ("multi_tensor", "adam", "foreach"),
        "copies": ("memcpy", "memset", "copy", "::to", "fill"),
        "compiled": ("triton",),
    }
    return next(
        (kind for kind, parts in words.items() if any(part in lowered for part in parts)), "other"
    )


def median_seconds(device: torch.device, function: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median seconds of a call, after two calls to warm up."""
    seconds = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def attention_kernels(size: Size) -> Numbers:
    """Measure forward and backward pass of each kernel at the 1B model's shape, with whole rows and
    eight documents."""
    from torchtitan.models.common.attention import Attention, with_kernel
    from torchtitan.protocols.attention import AttentionMetadata

    batch, length, heads, kv_heads, width = (1, 64, 4, 2, 16) if size.toy else (4, 2048, 32, 8, 64)
    dtype = torch.float32 if size.toy else torch.bfloat16
    inputs = [
        torch.randn(batch, length, n, width, device=size.device, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]
    documents = AttentionMetadata.from_positions(
        torch.arange(length).remainder(length // 8).expand(batch, -1)
    )
    rows = AttentionMetadata.of_rows(batch, length)
    results: Numbers = {}
    packed = ("documents", "dense") if size.toy else ("varlen", "flex", "dense")
    for name, attention in (
        ("causal", rows),
        *((kernel, documents.to(size.device)) for kernel in packed),
    ):
        chosen = dataclasses.replace(attention, kernel=name)
        prepared = with_kernel(
            chosen, device=size.device, dtype=dtype, head_dim=width, static=False
        )

        def compute(prepared: Any = prepared) -> None:
            torch.autograd.grad(Attention()(*inputs, prepared).sum(), inputs)

        try:
            results[name] = 1000 * median_seconds(size.device, compute)
        except Exception as error:  # a kernel that this torch or GPU lacks
            results[name] = f"{type(error).__name__}: {error}"[:200]
    return {"milliseconds": results}


def experts(size: Size) -> Numbers:
    """Measure forward and backward pass of a layer of Qwen3-30B-A3B's experts on 4,096 tokens."""
    from torchtitan.models.common.moe.experts import RoutedExperts
    from torchtitan.models.common.moe.layer import MixtureOfExperts
    from torchtitan.models.common.moe.router import Router, RoutingConfig

    tokens, dim, hidden, n_experts, k = (
        (64, 32, 16, 8, 2) if size.toy else (4096, 2048, 768, 128, 8)
    )
    router = Router(RoutingConfig(n_experts=n_experts, top_k=k), dim=dim, init_std=0.02)
    stds = {"init_std": 0.02, "out_init_std": 0.02}
    layer = MixtureOfExperts(
        router, RoutedExperts(n_experts=n_experts, top_k=k, dim=dim, hidden_dim=hidden, **stds)
    )
    layer = layer.to(size.device, torch.float32 if size.toy else torch.bfloat16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    x_BLD = torch.randn(
        1, tokens, dim, device=size.device, dtype=next(layer.parameters()).dtype, requires_grad=True
    )
    inputs = [x_BLD, *layer.parameters()]
    seconds = median_seconds(size.device, lambda: torch.autograd.grad(layer(x_BLD).sum(), inputs))
    flops = 6 * tokens * k * 3 * dim * hidden
    return {"milliseconds": 1000 * seconds, "tflops": flops / seconds / 1e12}


def recurrences(size: Size) -> Numbers:
    """Measure forward and backward pass of the recurrent layers of Qwen3-Next, Kimi Linear and
    Nemotron-H on 8,192 tokens in packed documents: by the kernel of a package, in chunks, and in
    compiled chunks."""
    from torchtitan.models.common.delta_net import GatedDeltaNet
    from torchtitan.models.common.kimi_delta import KimiDeltaNet
    from torchtitan.models.common.mamba import Mamba2, MambaConfig
    from torchtitan.protocols.attention import AttentionMetadata

    batch, length, heads, width, dim = (1, 64, 2, 16, 32) if size.toy else (4, 2048, 32, 128, 2048)
    shared = {"dim": dim, "norm_eps": 1e-6, "init_std": 0.02, "out_init_std": 0.02}
    sizes = {"key_head_dim": width, "value_head_dim": width, "conv_kernel_dim": 4}
    groups = {"head_dim": width // 2, "state_dim": width, "n_groups": heads // 2}
    layers: dict[str, Any] = {
        "gated delta net": GatedDeltaNet(
            num_key_heads=heads // 2, num_value_heads=heads, **sizes, **shared
        ),
        "Kimi delta attention": KimiDeltaNet(
            n_heads=heads, head_dim=width, conv_kernel_dim=4, **shared
        ),
        "Mamba 2": Mamba2(MambaConfig(n_heads=2 * heads, **groups), **shared),
    }
    positions = torch.arange(length).remainder(length // 4).expand(batch, -1)
    attention = AttentionMetadata.from_positions(positions).to(size.device)
    dtype = torch.float32 if size.toy else torch.bfloat16
    results: Numbers = {}
    for name, layer in layers.items():
        layer = layer.to(size.device, dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(std=0.02)
        x_BLD = torch.randn(batch, length, dim, device=size.device, dtype=dtype, requires_grad=True)
        kernel, inputs = layer.fused, [x_BLD, *layer.parameters()]
        backend = "aot_eager" if size.toy else "inductor"
        ways = {"in chunks": layer, "in compiled chunks": torch.compile(layer, backend=backend)}
        results[name] = {}
        for way, call in {**({"kernel": layer} if kernel else {}), **ways}.items():
            layer.fused = kernel if way == "kernel" else None

            def compute(call: Any = call, x: Any = x_BLD, inputs: Any = inputs) -> None:
                torch.autograd.grad(call(x, None, attention).sum(), inputs)

            results[name][way] = 1000 * median_seconds(size.device, compute)
    return {"milliseconds": results}


def generation(size: Size) -> Numbers:
    """Measure generation with the 1B model and random weights: the prompts, then new tokens, greedy
    and sampled."""
    from torchtitan.components.generation import Sampling
    from torchtitan.distributed import initialize_weights

    spec = model_registry("debugmodel" if size.toy else "1B")
    config = dataclasses.replace(spec.model, vocab_size=spec.model.vocab_size or 256)
    with torch.device("meta"):
        model = config.build()
    model = model.to(torch.float32 if size.toy else torch.bfloat16).to_empty(device=size.device)
    initialize_weights(model, 0)
    prompt_tokens, new = (16, 16) if size.toy else (512, 128)
    results: Numbers = {}
    for name, batch, sampling in (
        ("greedy, batch 1", 1, None),
        ("greedy, batch 8", 8, None),
        ("sampled, batch 8", 8, Sampling(temperature=1.0, top_p=0.9)),
    ):
        prompts = torch.randint(config.vocab_size, (batch, prompt_tokens)).tolist()
        # the first one warms up
        timed = [token_times(model, prompts, new, sampling) for _ in range(3)][1:]
        prompt_seconds = statistics.median(first - start for start, first, _ in timed)
        new_seconds = statistics.median(last - first for _, first, last in timed)
        results[name] = {
            "prompt_seconds": prompt_seconds,
            "tokens_per_second": batch * (new - 1) / new_seconds,
        }
    return results


def generation_without_graphs(size: Size) -> Numbers:
    """Measure the same, starting kernels one by one."""
    from torchtitan.components.generation.decode_graph import SWITCH

    os.environ[SWITCH] = "0"  # of this process, which has no other row
    return generation(size)


def token_times(
    model: Any, prompts: list[list[int]], new: int, sampling: Any
) -> tuple[float, float, float]:
    """Return the times at which generation starts, and has the first and the last of `new`
    tokens."""
    from torchtitan.components.generation import generate

    times = [time.perf_counter()]

    def on_token(row: int, token: int) -> bool:
        times.append(time.perf_counter())
        return False

    generate(model, prompts, max_new_tokens=new, sampling=sampling, on_token=on_token)
    return times[0], times[1], times[-1]


def save_stall(size: Size) -> Numbers:
    """Measure how long saves of a whole checkpoint block training; the first one pins memory."""
    config = size.pretraining()
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=2 if size.toy else 5,
        keep_latest_k=2,
        async_mode="async_with_pinned_mem",
    )
    return train(size, config)


def start_up(size: Size) -> Numbers:
    """Measure the whole command from a local folder of 8B weights to the end of the first step of
    LoRA."""
    from torchtitan.components.weights.export import config_json
    from torchtitan.components.weights.huggingface import write_huggingface
    from torchtitan.protocols.state_dict_adapter import model_tensor_specs

    spec = model_registry("debugmodel" if size.toy else "8B")
    spec.model.vocab_size = spec.model.vocab_size or 2050
    external = FORMAT.adapter(spec.model).external_specs(model_tensor_specs(spec.model))
    specs = {
        name: dataclasses.replace(each, dtype=torch.bfloat16) for name, each in external.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights")
        weights.mkdir()
        write_huggingface(
            weights, specs, lambda name: torch.full(specs[name].shape, 1e-3, dtype=torch.bfloat16)
        )
        (weights / "config.json").write_text(json.dumps(config_json(spec, {}, torch.bfloat16)))
        started = time.perf_counter()
        for file in weights.glob("*.safetensors"):
            with file.open("rb", buffering=0) as stream:
                while stream.read(2**26):
                    pass
        read = time.perf_counter() - started
        words = ["--module", "llama3", "--config", "debugmodel_lora" if size.toy else "8b_lora"]
        words += [
            "--hf_assets_path=",
            "--dataloader.dataset",
            "chats",
            "--dataloader.chat_template",
            "alpaca",
        ]
        words += [
            "--dump_folder",
            f"{folder}/run",
            "--training.steps=1",
            "--training.local_batch_size=1",
        ]
        words += ["--checkpoint.initial_load_path", str(weights), "--checkpoint.initial_load_in_hf"]
        words += [
            "--checkpoint.no_last_save_in_hf",
            "--checkpoint.export_dtype=None",
            "--checkpoint.no_enable",
        ]
        if size.toy:
            words += [f"--model.vocab_size={spec.model.vocab_size}"]
        started = time.perf_counter()
        command = [sys.executable, "-m", "torchtitan.cli.main", "train", *words]
        environment = {**os.environ, "NGPU": "1"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        seconds = time.perf_counter() - started
        assert done.returncode == 0, done.stdout[-600:]
    n_bytes = sum(each.n_bytes for each in specs.values())
    return {"seconds_to_end_of_step_1": seconds, "gib": n_bytes / 2**30, "read_seconds": read}


def cuda_tests(size: Size) -> Numbers:
    """Run the tests that need CUDA; without it, only collect them."""
    words = ["-q", "-n0", "-k", "cuda", *(["--collect-only"] if size.toy else [])]
    command = [sys.executable, "-m", "pytest", *words, *CUDA_TESTS]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    return {
        "exit_code": done.returncode,
        "summary": lines[-1] if lines else "",
        "failed": failed[:10],
    }


def float8(size: Size) -> Numbers:
    config = size.pretraining(compiled=True)
    few = {"emulate": True, "min_features": 16} if size.toy else {}
    config.model_converters = [Float8LinearConverter.Config(**few)]
    return train(size, config)


def narrow(size: Size, converter: Any) -> Numbers:
    """Train with linear layers in a narrow type; emulated on devices without the instructions."""
    config = size.pretraining(compiled=not size.toy)
    options = {"min_features": 32} if size.toy else {"min_features": 1024}
    config.model_converters = [converter(**options)]
    return train(size, config)


def short(size: Size, **optimizer: Any) -> Numbers:
    """Train four layers of the size 1B with an optimizer: its step is a large part of the time."""
    config = size.pretraining()
    config.model_spec.model.n_layers = 2 if size.toy else 4
    config.optimizer = dataclasses.replace(config.optimizer, **optimizer)
    if optimizer.get("rounding", "nearest") != "nearest":
        config.training.dtype = "bfloat16"
    if KINDS[config.optimizer.name].averages:
        config.lr_scheduler.decay_ratio = 0.0
    return train(size, config)


def float16(size: Size) -> Numbers:
    """Train in float16 with a scaled loss."""
    config = size.pretraining()
    config.training.mixed_precision_param = "float16"
    return train(size, config)


def loss_chunks(size: Size, chunk_tokens: int) -> Numbers:
    config = size.pretraining()
    config.model_spec.loss.chunk_tokens = chunk_tokens
    return train(size, config)


def image_back_ends(size: Size) -> Numbers:
    from image_back_ends import measure

    return measure(toy=size.toy)


ROWS: dict[str, Callable[[Size], Numbers]] = {
    "1B eager": lambda size: train(size, size.pretraining()),
    "1B selective": lambda size: train(size, size.pretraining(selective=True)),
    "1B compiled": lambda size: train(size, size.pretraining(compiled=True)),
    "8B LoRA": lambda size: train(size, size.adapters(LoRA.Config(), selective=True)),
    "8B LoRA compiled": lambda size: train(size, size.adapters(LoRA.Config(), compiled=True)),
    "8B QLoRA": lambda size: train(size, size.adapters(QLoRA.Config(), selective=True)),
    "8B QLoRA compiled": lambda size: train(size, size.adapters(QLoRA.Config(), compiled=True)),
    "profiled step": profiled,
    "save stall": save_stall,
    "CUDA tests": cuda_tests,
    "attention kernels": attention_kernels,
    "1B packed": lambda size: train(size, size.pretraining(packed=True)),
    "1B packed, compiled": lambda size: train(size, size.pretraining(packed=True, compiled=True)),
    "float8": float8,
    "MXFP8": partial(narrow, converter=MXFP8.Config),
    "NVFP4": partial(narrow, converter=NVFP4.Config),
    "float16": float16,
    "generation": generation,
    "generation without CUDA graphs": generation_without_graphs,
    "experts": experts,
    "recurrences": recurrences,
    "image back ends": image_back_ends,
    **{f"1B loss chunks of {n}": partial(loss_chunks, chunk_tokens=n) for n in (1024, 2048, 8192)},
    "8B start-up": start_up,
    **{f"optimizer {name}": partial(short, name=name) for name in KINDS},
    **{
        f"optimizer AdamW, bfloat16 weights, {rounding}": partial(short, rounding=rounding)
        for rounding in ("stochastic", "kahan")
    },
}

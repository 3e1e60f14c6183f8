"""Prediction and plan, compared with dry runs of the whole model and with sums done by hand."""

import dataclasses
import timeit
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from tests.foresight.published import FITTED, prediction_of, published_runs
from tests.training import read_metrics
from torchtitan.cli.auto_layout import layout_words
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.narrow import MXFP8, NVFP4
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import SequenceShards
from torchtitan.distributed.pipeline import PipelinePlan
from torchtitan.dry_run import dry_run
from torchtitan.dry_run.fake_trainer import with_vocabulary
from torchtitan.dry_run.fitting import USABLE, with_mode
from torchtitan.dry_run.observer import observing
from torchtitan.dry_run.report import reports_of
from torchtitan.dry_run.work_tracker import Kernel, WorkTracker
from torchtitan.foresight import plan, predict
from torchtitan.foresight import profile as foresight_profile
from torchtitan.foresight.capacity import _largest, capacities
from torchtitan.foresight.devices import DEVICES, device_in_file, device_named, device_of_gpu
from torchtitan.foresight.planning import MESH, option_words
from torchtitan.foresight.prediction import Layout, predict_from_reports
from torchtitan.foresight.profile import Portion, Split, find_prefixes
from torchtitan.foresight.time import (
    CONTENTION,
    Message,
    bubble_seconds,
    collective_seconds,
    kernel_seconds,
    step_parts,
)
from torchtitan.tools.cpu_products import onednn_products
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

DEVICE = DEVICES["h100"]
LAYERS = "--model.n_layers=6"
"""Twice as many as a profile has, at most."""


def configuration(tmp_path: Path, *words: str, config: str = "llama3_8b") -> Trainer.Config:
    options = ["--module=llama3", f"--config={config}", f"--dump_folder={tmp_path}", *words]
    result: Trainer.Config = ConfigManager().parse_args(options).config
    return result


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """Measure each layer once for all tests of this module: the dry runs of two plans repeat each
    other. Their reports do not depend on options that the key omits."""
    known: dict[tuple[object, ...], Portion] = {}
    measure = foresight_profile._measure

    def once(config: Trainer.Config, split: Split, n_layers: int) -> Portion:
        training = dataclasses.replace(
            config.training,
            steps=1,
            local_batch_size=1,
            global_batch_size=-1,
            enable_cpu_offload=False,
        )
        parallelism = ParallelismConfig(
            context_parallel_load_balancer=config.parallelism.context_parallel_load_balancer,
            fsdp_reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
            disable_loss_parallel=config.parallelism.disable_loss_parallel,
        )
        same = dataclasses.replace(
            with_mode(config, "none"),  # the mode is in `split`
            dump_folder="",
            training=training,
            parallelism=parallelism,
            compile=CompileConfig(),
            checkpoint=CheckpointManager.Config(),
            validator=Validator.Config(),
        )
        key = (repr(same), split, n_layers)
        if key not in known:
            known[key] = measure(config, split, n_layers)
        return known[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foresight_profile, "_measure", once)
        yield


@pytest.fixture
def small(tmp_path: Path) -> Trainer.Config:
    """On two devices its layouts need 0.045 to 1.0 GiB, and on four at least 0.024 GiB."""
    return configuration(tmp_path, "--training.global_batch_size=64", config="debugmodel")


def product(flops: float, n_bytes: float, phase: str = "forward") -> Kernel:
    return Kernel("product", phase, torch.bfloat16, round(flops), round(n_bytes))  # type: ignore[arg-type]


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def test_kernels_take_the_longer_of_computation_and_traffic():
    rate, bandwidth = 989e12 * DEVICE.product_efficiency, 3.35e12 * DEVICE.memory_efficiency
    for kernel in (product(rate, 1), product(1, bandwidth)):
        assert total(step_parts(DEVICE, [(kernel, 1)])) == pytest.approx(1.0)


def test_small_kernels_are_bound_by_launches():
    parts = step_parts(DEVICE, [(product(1, 1), 1000)])
    assert total(parts) == pytest.approx(1000 * DEVICE.launch_seconds)


def test_sharding_is_hidden_by_computation_and_tensor_parallelism_is_not():
    second = product(989e12 * DEVICE.product_efficiency, 1)
    bandwidth = DEVICE.link_efficiency * DEVICE.link_bandwidth
    n_bytes = 0.5 * bandwidth * 8 / 7  # half a second
    message = Message("FSDP", "all-gather", n_bytes / 100, 8, 8)
    start = 100 * (DEVICE.collective_seconds + 7 * DEVICE.link_latency)
    hidden = step_parts(DEVICE, [(second, 1), (message, 100)])
    assert total(hidden) == pytest.approx(1 + CONTENTION * (0.5 + start))
    exposed = step_parts(DEVICE, [(second, 1), (message._replace(role="tensor parallel"), 100)])
    assert total(exposed) == pytest.approx(1.5 + start)
    assert total(
        step_parts(DEVICE, [(second, 1), (message._replace(n_bytes=1e12), 0)])
    ) == pytest.approx(1)


def test_rings_use_all_network_devices_of_a_host():
    within, across, many = (
        collective_seconds(DEVICE, Message("FSDP", "all-gather", 1e12, ranks, per_host))
        for ranks, per_host in ((8, 8), (32, 1), (256, 8))
    )
    assert within == pytest.approx(7 / 8 * 1e12 / (0.8 * 450e9), rel=1e-3)
    assert across == pytest.approx(31 / 32 * 1e12 / (0.8 * 50e9), rel=1e-3)
    assert many == pytest.approx(255 / 256 * 1e12 / (0.8 * 400e9), rel=1e-2)


@pytest.mark.parametrize(("balancer", "degree"), [("none", 2), ("none", 8), ("headtail", 8)])
def test_causal_attention_of_the_slowest_context_rank(tmp_path: Path, balancer: Any, degree: int):
    """Against each rank's area under the diagonal of queries and keys."""
    shards, length = SequenceShards(degree, balancer), 4096
    pairs = [(shards.tokens_of_rank(rank, length) + 0.5).sum().item() for rank in range(degree)]
    words = [
        f"--parallelism.context_parallel_degree={degree}",
        f"--parallelism.context_parallel_load_balancer={balancer}",
    ]
    layout = Layout.of(configuration(tmp_path, *words), degree)
    causal = Kernel("attention", "backward", torch.bfloat16, 10**9, 0)
    others = [causal._replace(is_causal=False), product(10**9, 0)]
    work = list(layout.of_slowest_rank([(one, 3.0) for one in (causal, *others)]))
    assert work[0][0].flops == pytest.approx(10**9 * max(pairs) / (sum(pairs) / degree), rel=1e-6)
    assert [one for one, _ in work[1:]] == others and {calls for _, calls in work} == {3.0}


def test_bubble_of_a_pipeline():
    single, double = (
        PipelinePlan(name, 8, ((),) * n, 8) for name, n in (("1F1B", 8), ("Interleaved1F1B", 16))
    )
    assert bubble_seconds({"products": 1.0, "optimizer": 5.0}, single) == pytest.approx(7 / 8)
    assert bubble_seconds({"products": 1.0}, double) == pytest.approx(7 / 16)
    filled = dataclasses.replace(single, schedule="ZBVZeroBubble")
    assert bubble_seconds({"products": 1.0}, filled) == pytest.approx(7 / 8 / 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (8, [LAYERS, "--activation_checkpoint.mode=selective"]),
        (
            16,
            [LAYERS, "--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"],
        ),
        (
            4,
            [
                LAYERS,
                "--parallelism.context_parallel_degree=2",
                "--activation_checkpoint.mode=none",
            ],
        ),
    ],
)
def test_few_layers_predict_a_dry_run_of_all(tmp_path: Path, world_size: int, words: list[str]):
    """The extrapolation counts the same products, messages and memory. The optimizer's traffic is
    divided evenly, and the calls of messages are rounded, so times differ a little."""
    config = configuration(tmp_path, *words)
    reports = dry_run(config, world_size)
    whole = predict_from_reports(config, reports, world_size, DEVICE, 8)
    few = predict(config, world_size, DEVICE)
    assert few.parts["products"] == pytest.approx(whole.parts["products"], rel=1e-6)
    assert few.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert few.memory_gib == pytest.approx(
        max(r.peak_reserved_bytes for r in reports) / 2**30, rel=0.03
    )
    assert "tokens/s per device, MFU" in str(few)


def same_work(config: Trainer.Config) -> None:
    """Check the time of products and attention, and the memory, against a dry run of all layers.
    Launches, which bound small models, are not compared: those of the optimizer are not counted."""
    whole = predict_from_reports(config, dry_run(config, 2), 2, DEVICE, 8)
    few = predict(config, 2, DEVICE)
    for part in {"products", "attention"} & whole.parts.keys():
        assert few.parts[part] == pytest.approx(whole.parts[part], rel=1e-6)
    assert whole.parts["products"] > 0
    # of 16 MiB: the peaks of few and of all layers are not at the same operation
    assert few.memory_gib == pytest.approx(whole.memory_gib, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flavor", ["qwen3_5_debugmodel", "nemotron_h_debugmodel", "gemma2_debugmodel"]
)
def test_layers_of_several_kinds_predict_a_dry_run_of_all(tmp_path: Path, flavor: str):
    """Delta nets and attention, Mamba and attention, windows and whole attention."""
    family = flavor.removesuffix("_debugmodel").removesuffix("2")
    words = ["--model.n_layers=8", "--activation_checkpoint.mode=none"]
    config = configuration(tmp_path, f"--module={family}", *words, config=flavor)
    assert len(set(with_vocabulary(config).model_spec.model.layer_kinds)) > 1
    same_work(config)


@pytest.mark.slow
def test_a_class_that_reads_images_is_predicted(tmp_path: Path):
    """The vision tower and the images of a batch are in the part that does not grow with layers;
    layers with windows and with whole attention take turns."""
    pytest.importorskip("transformers")
    from tests.tiny_vision import vision_folder

    types = ["sliding_attention", "full_attention"] * 4
    layers = {"num_hidden_layers": len(types), "layer_types": types}
    folder = vision_folder("gemma3", tmp_path / "model", **layers)
    words = [f"--hf_assets_path={folder}", "--dataloader.dataset=my.jsonl"]
    words += ["--training.seq_len=512", "--activation_checkpoint.mode=none"]
    same_work(configuration(tmp_path, "--module=auto", *words, config="sft_images"))


@pytest.mark.parametrize(
    "kinds",
    [
        "aaaaaaaa",
        "baaaaaaa",
        "abababab",
        "aabaabaab",
        "bbbabcabcabcabcaab",
        "aaaaabbbbb",
        "abcabcd",
        "aa",
        "ab",
    ],
)
def test_prefixes_give_the_sum_of_all_layers(kinds: str):
    """Kinds have any costs, and the sum of all is that of the first layers and of the mean ones."""
    cost = {kind: 7.0 ** (1 + number) for number, kind in enumerate("abcd")}
    lengths, weights = find_prefixes(kinds, lambda n: True)
    sums = [sum(cost[kind] for kind in kinds[:n]) for n in lengths]
    mean = sum(weight * total for weight, total in zip(weights, sums, strict=True))
    n_others = len(kinds) - lengths[0]
    assert sums[0] + n_others * mean == pytest.approx(sum(cost[kind] for kind in kinds), rel=1e-12)
    assert sum(weights) == pytest.approx(0, abs=1e-12)


def test_prefixes_are_the_fewest_and_only_models():
    assert find_prefixes("a" * 32, lambda n: True).lengths == (2, 3)
    assert find_prefixes("aa", lambda n: True).lengths == (1, 2)
    assert find_prefixes("ab" * 16, lambda n: True).lengths == (2, 4)
    assert find_prefixes("aaab" * 8, lambda n: n % 4 == 0).lengths == (4, 8)
    with pytest.raises(UserError, match="of which the first also form a model"):
        find_prefixes("ab" * 16, lambda n: n == 2)


@pytest.mark.slow
def test_frozen_weights_have_no_gradients(tmp_path: Path):
    words = [LAYERS, "--dataloader.dataset=my.jsonl", "--activation_checkpoint.mode=full"]
    config = configuration(tmp_path, *words, config="llama3_8b_lora")
    (report,) = reports_of(config, 1)
    assert predict(config, 1, DEVICE).memory_gib == pytest.approx(
        report.peak_reserved_bytes / 2**30, rel=0.03
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", ["5", "10", "14"])
def test_published_rows_that_were_not_fitted(row: str):
    """docs/foresight.md shows all rows."""
    assert len(FITTED) <= len(published_runs()) / 2
    run = next(run for run in published_runs() if run.id == row)
    prediction = prediction_of(run)
    assert prediction.tokens_per_second == pytest.approx(run.tokens_per_s, rel=0.12)
    assert prediction.memory_gib == pytest.approx(run.gib, rel=0.10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--module=llama4", "--config=debugmodel"],
        [LAYERS, "--config=debugmodel", "--optimizer.name=Muon"],
    ],
    ids=["chunks", "Muon"],
)
def test_other_models_and_optimizers_have_the_products_of_a_dry_run(
    tmp_path: Path, words: list[str]
):
    """Only products and attention: the launches of the optimizer, which bound these small models,
    are not counted."""
    config = configuration(tmp_path, *words)
    whole = predict_from_reports(config, dry_run(config, 4), 4, DEVICE, 8)
    few = predict(config, 4, DEVICE)
    for part in ("products", "attention"):
        assert few.parts[part] == pytest.approx(whole.parts[part], rel=1e-6)
    assert whole.parts["products"] > 0


@pytest.mark.slow
def test_narrow_products_are_those_of_the_selected_layers(tmp_path: Path):
    """Of the flavor's 32 blocks, 28 are narrow, each with the same products; in the head, nothing.
    The rates follow from single kernels. The products of a dry run are the same."""
    device = dataclasses.replace(DEVICES["b200"], launch_seconds=0.0, memory_bandwidth=1e30)
    wide, narrow = (
        predict(configuration(tmp_path, config=name), 8, device).parts["products"]
        for name in ("llama3_8b", "llama3_8b_nvfp4")
    )
    kernels = (Kernel("product", "forward", dtype, 10**15, 0) for dtype in _TYPES)
    of_bfloat16, of_float4 = (kernel_seconds(device, one, is_compiled=False) for one in kernels)
    in_layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    share = 28 / 32 * in_layers / (in_layers + 4096 * 128256)
    assert narrow / wide == pytest.approx(1 - share + share * of_float4 / of_bfloat16, rel=1e-3)


_TYPES = (torch.bfloat16, torch.float4_e2m1fn_x2)


@pytest.mark.slow
def test_a_dry_run_has_the_narrow_products_of_a_plan(tmp_path: Path):
    config = configuration(tmp_path, config="debugmodel")
    config.model_spec.model.vocab_size = 2048
    config.model_converters = [NVFP4.Config(min_features=16, exclude=[r"layers\.1\."])]
    device = dataclasses.replace(DEVICES["b200"], launch_seconds=0.0, memory_bandwidth=1e30)
    whole = predict_from_reports(config, dry_run(config, 2), 2, device, 8)
    few = predict(config, 2, device)
    assert few.parts["products"] == pytest.approx(whole.parts["products"], rel=1e-6)


@pytest.mark.parametrize(
    ("device", "converter", "message"),
    [
        ("a100", Float8LinearConverter.Config(), "A100 .* no kernels for float8 .for: none"),
        ("h100", MXFP8.Config(), "H100 .* no kernels for mxfp8 .for: float8"),
        ("rtx5090", NVFP4.Config(), "RTX 5090 .* no kernels for nvfp4"),
        ("b200", MXFP8.Config(emulate=True), "mxfp8.emulate is set"),
    ],
)
def test_narrow_types_without_kernels_are_refused(
    tmp_path: Path, device: str, converter: Any, message: str
):
    config = configuration(tmp_path, config="debugmodel")
    config.model_converters = [converter]
    for function in (plan, predict, lambda *args: predict_from_reports(config, [], 2, args[2], 8)):
        with pytest.raises(UserError, match=message):
            function(config, 2, DEVICES[device])


def test_experts_that_every_device_emulates_are_refused(tmp_path: Path):
    words = ["--module=qwen3_moe", "--config=debugmodel", f"--dump_folder={tmp_path}"]
    config = ConfigManager().parse_args(words).config
    config.model_converters = [NVFP4.Config(min_features=16)]
    with pytest.raises(UserError, match=r"layers\.0\.moe\.experts is emulated on every device"):
        predict(config, 1, "b200")


def test_attention_without_a_mask_computes_the_whole_square():
    counts = {}
    for is_causal in (True, False):
        tracker = WorkTracker()
        x = torch.randn(1, 2, 64, 32, dtype=torch.bfloat16, requires_grad=True)
        with observing(tracker):
            F.scaled_dot_product_attention(x, x, x, is_causal=is_causal).sum().backward()
        work = [(one, calls) for one, calls in tracker.work.items() if one.kind == "attention"]
        assert len(work) == 2  # forward and backward
        device = dataclasses.replace(DEVICE, memory_bandwidth=1e30, is_asynchronous=False)
        counts[is_causal] = step_parts(device, work)["attention"]
    assert counts[False] == pytest.approx(2 * counts[True])


@pytest.mark.slow
def test_activations_count_if_another_peak_is_higher_in_few_layers(tmp_path: Path):
    """With one window, few layers need most memory for the gradient of the embedding, and all of
    them when activations wait for the backward pass."""
    words = [
        "--model.n_layers=12",
        "--parallelism.tensor_parallel_degree=8",
        "--training.local_batch_size=1",
    ]
    config = configuration(tmp_path, *words, "--activation_checkpoint.mode=selective")
    peak = max(report.peak_reserved_bytes for report in dry_run(config, 64))
    assert predict(config, 64, DEVICE).memory_gib == pytest.approx(peak / 2**30, rel=0.05)


@pytest.mark.slow
def test_an_optimizer_in_host_memory_needs_none_of_the_device(tmp_path: Path):
    offloaded, plain = (
        predict(configuration(tmp_path, f"--optimizer.name={name}", config="debugmodel"), 2, DEVICE)
        for name in ("AdamWOffload", "AdamW")
    )
    states = 2 * 4 * 4_196_608 / 2  # two float32 moments of the parameters, on two devices; eager
    assert plain.memory_gib - offloaded.memory_gib == pytest.approx(1.2 * states / 2**30, rel=0.01)


@pytest.mark.slow
def test_plan_fits_and_ranks(small: Trainer.Config, tmp_path: Path):
    device = dataclasses.replace(DEVICE, memory_gib=0.5)
    found = plan(small, 2, device, best=2)
    rates = [option.tokens_per_second for option in found.options]
    assert rates == sorted(rates, reverse=True)
    assert all(option.memory_gib < device.memory_gib for option in found.options)
    assert found.n_compared > found.n_too_large > 0
    assert "slower" in found.reason(1)
    best = found.options[0]
    words = [
        "--training.global_batch_size=64",
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.expert_tensor_parallel_degree=2",
    ]
    other = configuration(tmp_path, *words, config="debugmodel")
    again = configuration(
        tmp_path, *words, *option_words(other, best.layout.config.to_dict()), config="debugmodel"
    )
    assert again.training.resolve_global_batch_size(best.layout.dims.dp_degree) == 64
    assert again.check_layout(2) == best.layout.dims


@pytest.mark.parametrize("limit", [3.0, 10.0, 10.999, 500.0, 999.0, 5000.0])
@pytest.mark.parametrize("grow", [lambda n: n, lambda n: n + n % 7, lambda n: max(5, n // 9 * 9)])
def test_the_largest_number_within_a_limit(limit: float, grow: Callable[[int], float]):
    """Memory that grows by steps, and by each number."""
    calls = []

    def memory_gib(n: int) -> float:
        calls.append(n)
        return grow(n)

    found = _largest(memory_gib, limit, 1000)
    fits = [n for n in range(1, 1001) if grow(n) <= limit]
    assert (found == 0) == (1 not in fits)
    if found:
        assert found in fits
        assert found == 1000 or grow(found + 1) > limit
    if grow(13) == 13:
        assert len(set(calls)) <= 4


@pytest.mark.slow
def test_one_more_does_not_fit(tmp_path: Path):
    device = dataclasses.replace(DEVICE, memory_gib=0.5)
    config = configuration(tmp_path, "--model.vocab_size=4096", config="debugmodel")
    (best,) = plan(config, 1, device, best=1).options
    for one in capacities(best.layout, device):
        for more, fits in ((0, True), (1, False)):
            mode = f"--activation_checkpoint.mode={one.mode}"
            sizes = (
                [f"--training.local_batch_size={one.sequences + more}"],
                ["--training.local_batch_size=1", f"--training.seq_len={one.window + 256 * more}"],
            )
            for words in sizes if one.window < config.model_spec.model.max_seq_len else sizes[:1]:
                sized = configuration(
                    tmp_path, "--model.vocab_size=4096", mode, *words, config="debugmodel"
                )
                assert (predict(sized, 1, device).memory_gib <= USABLE * 0.5) == fits


@pytest.mark.slow
def test_command_writes_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "best.yaml"
    words = [
        "plan",
        "--devices=2",
        "--devices_per_host=2",
        f"--apply={file}",
        "--global_batch_size=8",
    ]
    assert main([*words, "--config=debugmodel", f"--dump_folder={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "Best: NGPU=2 torchtitan train --config=debugmodel" in output
    applied = ConfigManager().parse_args(["--config_file", str(file)]).config
    assert isinstance(applied.check_layout(2), ParallelDims)


@pytest.mark.slow
def test_nothing_fits(small: Trainer.Config):
    device = dataclasses.replace(DEVICE, memory_gib=0.03)
    with pytest.raises(
        UserError, match=r"no layout fits into the 0.0 GiB .* the nearest of .* fit: 4 devices, "
    ):
        plan(small, 2, device)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--device=h1000", "unknown device 'h1000' (known: h100, "),
        ("--devices=0", "--devices is 0"),
        ("--global_batch_size=-5", "--global_batch_size is -5"),
        ("--module=rl --config=rl_debugmodel", "a dry run cannot sample answers"),
        ("--compile.enable --compile.backend=foo", "--compile.backend is 'foo', and torch knows "),
        ("--training.seq_len=0", "--training.seq_len is 0, but must be at least 1"),
        (
            "--parallelism.context_parallel_degree 2",
            "--parallelism.context_parallel_degree is chosen by torchtitan plan",
        ),
        ("--apply=/nowhere/best.yaml", "--apply '/nowhere/best.yaml' cannot be written"),
        ("--apply=.", "--apply '.' cannot be written"),
        (
            "--device_file=/nowhere",
            "the device file '/nowhere' cannot be read: No such file or directory",
        ),
    ],
)
def test_mistake_on_the_command_line_is_one_line(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", "--devices=2", *word.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchtitan plan: {message}")


def test_devices(tmp_path: Path):
    with pytest.raises(UserError, match="unknown device 'h1000' .*h200.*--device_file"):
        device_named("h1000", 1)
    path = tmp_path / "device.yaml"
    own = dataclasses.asdict(DEVICE)
    path.write_text(yaml.safe_dump(own))
    assert device_in_file(path) == DEVICE
    path.write_text(yaml.safe_dump({**own, "float4_flops": 0}))
    assert device_in_file(path).float4_flops == 0
    for text, message in {
        yaml.safe_dump({**own, "narrow_formats": ["fp8"]}): "narrow_formats is fp8, but must be",
        "[": "is not valid YAML",
        "3": "must map names",
        "name: x": "missing keys memory_gib",
        yaml.safe_dump({**own, "speed": 1}): "unknown keys speed",
        yaml.safe_dump(
            {**own, "memory_gib": "much"}
        ): "'memory_gib' is 'much', but must be a number",
        yaml.safe_dump({**own, "memory_gib": -1}): "memory_gib is -1, but must be a number above 0",
        yaml.safe_dump(
            {**own, "is_asynchronous": "maybe"}
        ): "is_asynchronous. is 'maybe', but must be",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            device_in_file(path)
    with pytest.raises(
        UserError,
        match=r"the device file '.*missing.yaml' cannot be read: No such file or directory$",
    ):
        device_in_file(tmp_path / "missing.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_auto_writes_its_layout_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
):
    monkeypatch.setattr("torchtitan.cli.auto_layout._own_device", lambda *sizes: DEVICE)
    monkeypatch.setenv("NGPU", str(processes))
    options = [
        "--parallelism.auto",
        "--validator.enable=false",
        "--checkpoint.enable",
    ]
    run = [
        "train",
        "--config=debugmodel",
        f"--dump_folder={tmp_path}",
        "--checkpoint.interval=1",
        *options,
    ]
    assert main([*run, "--training.steps=1"]) == 0
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["parallelism"]["auto"] is False
    assert written["training"]["global_batch_size"] == 8 * processes
    assert (
        prod(written["parallelism"][name.removeprefix("parallelism.")] for name in MESH)
        == processes
    )
    assert read_metrics(tmp_path, "loss")
    written["training"]["local_batch_size"] = 2  # not the choice of a plan
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    kept = layout_words(
        configuration(tmp_path, "--checkpoint.enable", config="debugmodel"), processes, processes
    )
    assert "--training.local_batch_size=2" in kept


@pytest.mark.slow
def test_speed_of_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Against products timed here, alone and in the fastest of 50 calls: two processes are slower,
    and other programs may be busy. Processes beyond the cores have the speed of one per core."""
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torchtitan.foresight.this_machine.usable_cores", lambda: 2)
    monkeypatch.setattr("torchtitan.foresight.this_machine._SECONDS", 1.0)
    device = device_named("cpu", 2)
    for dtype, flops in {
        torch.float32: device.float32_flops,
        torch.bfloat16: device.bfloat16_flops,
    }.items():
        a, b = torch.rand(1024, 256, dtype=dtype), torch.rand(256, 768, dtype=dtype)
        with onednn_products():
            fastest = min(timeit.repeat(lambda a=a, b=b: a @ b, number=1, repeat=50))
        assert 0.05 < flops * fastest / (2 * 1024 * 256 * 768) < 1.5
    assert 0.01 < device.attention_efficiency < 1
    assert min(device.memory_bandwidth, device.link_bandwidth, device.collective_seconds) > 0
    assert device_named("cpu", 4) == device and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "key"),
    {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA B300 SXM6 AC": "b300",
        "NVIDIA GB200": "gb200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "A100-SXM4-80GB": "a100",  # older drivers
        "NVIDIA L40S": "l40s",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 5090": "rtx5090",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA H100 PCIe": None,
        "NVIDIA H100 NVL": None,
        "NVIDIA H200 NVL": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA A100-SXM4-40GB": None,
        "NVIDIA A100 80GB PCIe": None,
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb": None,
        "NVIDIA L40": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": None,
        "AMD Instinct MI300X VF": None,
    }.items(),
)
def test_gpus_by_name(name: str, key: str | None):
    assert device_of_gpu(name) == (DEVICES[key] if key else None)


def test_products_in_narrow_types_take_their_own_time():
    """Each type at the rate of its data sheet; an A100 has no 4-bit units."""
    times = {}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
        kernel = Kernel("product", "forward", dtype, 10**15, 0)
        times[dtype] = kernel_seconds(DEVICES["b200"], kernel, is_compiled=False)
    eight, four = times[torch.float8_e4m3fn], times[torch.float4_e2m1fn_x2]
    assert eight == 2 * four and times[torch.bfloat16] > eight
    with pytest.raises(UserError, match="A100 SXM 80 GB has no 4-bit units"):
        kernel_seconds(DEVICES["a100"], kernel, is_compiled=False)


def test_auto_needs_the_launcher(tmp_path: Path):
    config = configuration(tmp_path, "--parallelism.auto", config="debugmodel")
    with pytest.raises(UserError, match="torchtitan plan"):
        config.check_layout(1)


def test_hosts_are_whole(tmp_path):
    with pytest.raises(UserError, match="80 devices do not fill hosts of 72"):
        plan(configuration(tmp_path, config="debugmodel"), 80, "gb200")
    with pytest.raises(UserError, match="12 devices do not fill hosts of 8"):
        plan(configuration(tmp_path, config="debugmodel"), 12)

"""Memory of adapters on experts that stay in few bits, and on the dequantized ones.

    python benchmarks/few_bits.py [--n_experts 128] [--size 768]

A random gpt-oss of two layers is written in MXFP4, for the family here and for its class in
transformers, and a random Qwen3-MoE in FP8, for its class. `CONFIG=qlora` and `CONFIG=lora` dry-run
a step of one window of 128 tokens, then take two, in processes of their own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER

MIB = 2**20
_QUESTIONS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}."},
        ]
    }
    for n in range(48)
]


def gpt_oss(n_experts: int, **sizes: int) -> PretrainedConfig:
    return GptOssConfig(
        **sizes,
        intermediate_size=sizes["hidden_size"],
        num_local_experts=n_experts,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=False,
    )


def qwen3_moe(n_experts: int, **sizes: int) -> PretrainedConfig:
    width = sizes["hidden_size"]
    return Qwen3MoeConfig(
        **sizes, intermediate_size=width, moe_intermediate_size=width, num_experts=n_experts
    )


def mxfp4(name: str, experts: Tensor) -> dict[str, Tensor]:
    groups = (len(experts), experts.shape[2], experts.shape[1] // 32)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*groups, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(118, 122, groups, dtype=torch.uint8),
    }


def fp8(name: str, experts: Tensor) -> dict[str, Tensor]:
    """Each expert has its own tensors, in blocks of 128 x 128."""
    layer, _, matrix = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    rows, inputs = experts.shape[1] // len(parts), experts.shape[2]
    tensors: dict[str, Tensor] = {}
    for expert in range(len(experts)):
        for part in parts:
            values = torch.randn(rows, inputs).to(torch.float8_e4m3fn)
            scales = torch.full((-(-rows // 128), -(-inputs // 128)), 0.02)
            tensors[f"{layer}.{expert}.{part}.weight"] = values
            tensors[f"{layer}.{expert}.{part}.weight_scale_inv"] = scales
    return tensors


MODELS = {"gpt-oss": (gpt_oss, mxfp4, "mxfp4"), "Qwen3-MoE": (qwen3_moe, fp8, "fp8")}
"""Model → its configuration, form of the experts, and its name in config.json."""

RUNS = (("gpt-oss", "auto"), ("gpt-oss", "transformers"), ("Qwen3-MoE", "transformers"))
"""Models and modules."""


def write_folder(folder: Path, model_name: str, n_experts: int, size: int) -> None:
    """Write a random model with experts in few bits, its tokenizer, and conversations."""
    describe, quantize, method = MODELS[model_name]
    config = describe(
        n_experts,
        vocab_size=2048,
        hidden_size=size,
        num_hidden_layers=2,
        num_attention_heads=size // 64,
        num_key_value_heads=2,
        head_dim=64,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors |= quantize(name, tensor)
        else:
            tensors[name] = torch.randn(tensor.shape).mul(0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    document = json.loads(config.to_json_string(use_diff=False))
    document |= {"quantization_config": {"quant_method": method}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(document))
    shutil.copytree(EMBEDDED_TOKENIZER, folder, dirs_exist_ok=True)
    lines = [json.dumps(row) for row in _QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines))


def train(module: str, name: str, folder: Path, dump_folder: Path, **environment: str) -> None:
    """Run a configuration of a module."""
    words = f"train --module {module} --config {name} --hf_assets_path {folder}"
    words += f" --dataloader.dataset {folder}/data.jsonl --dataloader.chat_template alpaca"
    words += " --model.max_seq_len 128 --training.seq_len 128 --training.local_batch_size 1"
    words += f" --training.steps 2 --metrics.log_freq 1 --dump_folder {dump_folder}"
    words += (
        " --checkpoint.no_enable --checkpoint.no_last_save_in_hf --checkpoint.export_dtype None"
    )
    command = [sys.executable, "-m", "torchtitan", *words.split()]
    subprocess.run(
        command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_experts", type=int, default=128)
    parser.add_argument("--size", type=int, default=768)
    options = parser.parse_args()
    print("| model | module | run | weights, MiB | step, MiB | process, GiB |")
    for model_name, module in RUNS:
        compare(model_name, module, options.n_experts, options.size)


def compare(model_name: str, module: str, n_experts: int, size: int) -> None:
    """Print a row for each run."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_folder(folder, model_name, n_experts, size)
        for name in ("lora", "qlora"):
            dump_folder = folder / name
            train(module, name, folder, dump_folder, COMM_MODE="fake_backend")
            [rank] = json.loads((dump_folder / "dry_run.json").read_text())["ranks"]
            train(module, name, folder, dump_folder)
            lines = (dump_folder / "metrics.jsonl").read_text().splitlines()
            peak = max(json.loads(line).get("memory_gib", 0) for line in lines)
            weights, step = rank["parameter_bytes"] / MIB, rank["peak_bytes"] / MIB
            print(f"| {model_name} | {module} | {name} | {weights:.0f} | {step:.0f} | {peak:.2f} |")


if __name__ == "__main__":
    main()

"""Memory of adapters on experts that stay in MXFP4, and on the dequantized ones.

    python benchmarks/few_bits.py [--n_experts 128] [--size 768]

A random gpt-oss of two layers is written in MXFP4. `CONFIG=qlora` and `CONFIG=lora` dry-run a step
of one window of 128 tokens, then take two, in processes of their own.
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
from transformers import AutoModelForCausalLM, GptOssConfig

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


def write_folder(folder: Path, n_experts: int, size: int) -> None:
    """Write a random model with experts in MXFP4, its tokenizer, and conversations."""
    config = GptOssConfig(
        vocab_size=2048,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=2,
        num_attention_heads=size // 64,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=n_experts,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            groups = (n_experts, tensor.shape[2], tensor.shape[1] // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, groups, dtype=torch.uint8)
        else:
            tensors[name] = torch.randn(tensor.shape).mul(0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    document = json.loads(config.to_json_string(use_diff=False))
    document |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(document))
    shutil.copytree(EMBEDDED_TOKENIZER, folder, dirs_exist_ok=True)
    lines = [json.dumps(row) for row in _QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines))


def train(name: str, folder: Path, dump_folder: Path, **environment: str) -> None:
    """Run a configuration of the module `auto`."""
    words = f"train --module auto --config {name} --hf_assets_path {folder}"
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
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_folder(folder, options.n_experts, options.size)
        print("| run | weights, MiB | peak of a step, MiB | peak of the process, GiB |")
        for name in ("lora", "qlora"):
            dump_folder = folder / name
            train(name, folder, dump_folder, COMM_MODE="fake_backend")
            [rank] = json.loads((dump_folder / "dry_run.json").read_text())["ranks"]
            train(name, folder, dump_folder)
            lines = (dump_folder / "metrics.jsonl").read_text().splitlines()
            peak = max(json.loads(line).get("memory_gib", 0) for line in lines)
            weights, step = rank["parameter_bytes"] / MIB, rank["peak_bytes"] / MIB
            print(f"| {name} | {weights:.0f} | {step:.0f} | {peak:.2f} |")


if __name__ == "__main__":
    main()

"""Speed of greedy generation in this project against transformers' `generate`, in one run on one machine.

    python benchmarks/generation.py [--rounds 3] [--prompt_tokens 128] [--new_tokens 64]

Both continue the same random prompts with the same random Llama (dim 512, 8 layers, 8 heads, 4 key/value heads,
ffn 1,536, vocabulary 8,192) in float32, with their key/value caches, and must give the same tokens. They take turns, so
that a change in the machine's load hits both; the fastest round counts. Speed is the total
over all rows, including the pass over the prompts.
"""

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
import transformers

from torchtitan.components.generation import generate
from torchtitan.models.pretrained import load_model
from torchtitan.tools.device import device_type

BATCH_SIZES = (1, 8)


def make_model(folder: str) -> transformers.LlamaForCausalLM:
    """Return a random model, and save it for the other project."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.to(device_type())


def seconds_and_ids(continue_prompts: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return the seconds and the new tokens."""
    started = time.perf_counter()
    ids = continue_prompts()
    return time.perf_counter() - started, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each project, taking turns")
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = make_model(folder)
        ours = load_model(folder, device=device_type()).model
    print(f"{'batch':>5} {'project':13} {'new tokens/s':>12}")
    for batch_size in BATCH_SIZES:
        prompts = torch.randint(8192, (batch_size, options.prompt_tokens), device=device_type())

        def with_ours(prompts: torch.Tensor = prompts) -> list[list[int]]:
            generations = generate(ours, prompts.tolist(), max_new_tokens=options.new_tokens)
            return [generation.ids for generation in generations]

        def with_theirs(prompts: torch.Tensor = prompts) -> list[list[int]]:
            out = theirs.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=options.new_tokens,
                pad_token_id=0,
            )
            return out[:, options.prompt_tokens :].tolist()

        rounds = [(seconds_and_ids(with_ours), seconds_and_ids(with_theirs)) for _ in range(options.rounds)]
        assert all(mine[1] == reference[1] for mine, reference in rounds), "the tokens differ"
        new = batch_size * options.new_tokens
        for project, index in (("torchtitan", 0), ("transformers", 1)):
            print(f"{batch_size:5} {project:13} {new / min(times[index][0] for times in rounds):12.0f}", flush=True)


if __name__ == "__main__":
    main()

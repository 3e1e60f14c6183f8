"""Tokens/s of `torchtitan serve` compared with transformers' `generate`, in one run on this
machine.

    python benchmarks/serving.py [--clients 8 64] [--tokens 128] [--rounds 3]

Each client sends one request at a time over HTTP, and all of them at once: a prompt of 32 random
tokens, continued at temperature 1. transformers gets the same prompts as one batch in memory,
without HTTP and without waiting for others; both compute float32 on the same number of threads.
Rounds alternate, and the ratio is that of a round; the table gives the median, minimum and maximum.
The same for processor time per token, of the server's process and of this one in `generate`: other
programs on the machine change it less than the time on the clock.
The model is a Llama with random weights, so that nearly no text ends before the limit; the server's
tokens are those that it reports.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan.components.tokenizer import PretrainedTokenizer

PROMPT_TOKENS = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 64], help="clients at a time")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each text")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each system")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder, options.width, options.layers)
        with Server(folder) as server:
            print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {cpu_name()}")
            for n_clients in options.clients:
                measure(model, server, n_clients, options.tokens, options.rounds)


def make_model(folder: Path, width: int, n_layers: int) -> Any:
    """Save a random Llama with the built-in tokenizer, and return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = PretrainedTokenizer.Config().build()
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    assert tokenizer.folder is not None
    for file in tokenizer.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return model


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}"


class Server:
    """`torchtitan serve` in a process of its own."""

    def __init__(self, folder: Path):
        words = ["-m", "torchtitan", "serve", "--checkpoint", str(folder), "--port", "0"]
        words += ["--dtype", "float32", "--model_name", "model"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._process = subprocess.Popen(
            [sys.executable, *words], stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stderr is not None
        line = next(line for line in self._process.stderr if "serving model at " in line)
        self._url = line.partition(" at ")[2].partition(" ")[0]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait()

    def cpu_seconds(self) -> float:
        """Return the processor time of the server since its start."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def complete(self, prompt: list[int], n_tokens: int) -> int:
        """Return the number of tokens that one request generates."""
        body = {"model": "model", "prompt": prompt, "max_tokens": n_tokens, "temperature": 1}
        request = urllib.request.Request(
            f"{self._url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])


class Speed(NamedTuple):
    """Tokens of a round per second."""

    of_clock: float
    of_processor: float
    """Per second of processor time."""


def serve_all(server: Server, prompts: list[list[int]], n_tokens: int) -> Speed:
    """Return the speed of all clients together."""
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda one=one: counts.append(server.complete(one, n_tokens)))
        for one in prompts
    ]
    started, cpu_before = time.perf_counter(), server.cpu_seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_seconds = time.perf_counter() - started, server.cpu_seconds() - cpu_before
    assert len(counts) == len(prompts), "a request failed"
    return Speed(sum(counts) / seconds, sum(counts) / cpu_seconds)


def generate_all(model: Any, prompts: list[list[int]], n_tokens: int) -> Speed:
    """Return the speed of transformers for a batch."""
    tokens = torch.tensor(prompts)
    started, cpu_before = time.perf_counter(), time.process_time()
    with torch.no_grad():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            top_k=0,
            max_new_tokens=n_tokens,
            min_new_tokens=n_tokens,
            pad_token_id=0,
        )
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    n_new = (out.shape[1] - tokens.shape[1]) * len(prompts)
    return Speed(n_new / seconds, n_new / cpu_seconds)


def measure(model: Any, server: Server, n_clients: int, n_tokens: int, n_rounds: int) -> None:
    """Print the speeds for a number of clients."""
    numbers = random.Random(n_clients)
    prompts = [[numbers.randrange(2, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(n_clients)]
    serve_all(server, prompts, 8)
    generate_all(model, prompts, 8)
    ours = []
    theirs = []
    for _ in range(n_rounds):
        ours.append(serve_all(server, prompts, n_tokens))
        theirs.append(generate_all(model, prompts, n_tokens))
    for name, label in (("of_clock", "second"), ("of_processor", "second of processor time")):
        own = [getattr(speed, name) for speed in ours]
        other = [getattr(speed, name) for speed in theirs]
        ratios = [one / two for one, two in zip(own, other, strict=True)]
        print(
            f"{n_clients} clients, tokens per {label}: served {statistics.median(own):,.0f}, "
            f"transformers {statistics.median(other):,.0f}, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Continue random prompts greedily with a system, on the task in a folder: each step is one batch
of continuations.

Both systems have the same random weights and key/value caches; see `benchmarks/peers.py`."""

import hashlib
import sys
import time

import torch
from hugging_face import make_model
from task import NEW_TOKENS, StepLog, Task

from torchtitan.components.generation import generate
from torchtitan.models.pretrained import load_model


def main(folder: str, system: str) -> None:
    task, log = Task.read(folder), StepLog(folder)
    torch.manual_seed(0)
    theirs = make_model(task).to(getattr(torch, task.precision)).eval()
    theirs.config.use_cache = theirs.generation_config.use_cache = True
    if system == "torchtitan":
        theirs.save_pretrained(folder)
        theirs, ours = (
            None,
            load_model(folder, device="cpu", dtype=getattr(torch, task.precision)).model,
        )
    for _ in range(task.steps):
        prompts = torch.randint(task.vocab_size, (task.batch_size, task.seq_len))
        if system == "torchtitan":
            texts = [
                text.ids for text in generate(ours, prompts.tolist(), max_new_tokens=NEW_TOKENS)
            ]
        else:
            mask = torch.ones_like(prompts)
            out = theirs.generate(
                prompts,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
            texts = out[:, task.seq_len :].tolist()
        count = sum(map(len, texts))
        log.end_step(time.monotonic(), count, count)
    print(f"last texts: {hashlib.sha256(str(texts).encode()).hexdigest()[:12]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run a plain PyTorch loop over transformers' model on the task in a folder."""

import sys
import time

import torch
from hugging_face import make_model, random_windows
from task import BETAS, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, StepLog, Task


def main(folder: str) -> None:
    task, log = Task.read(folder), StepLog(folder)
    model = make_model(task).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    for batch in torch.utils.data.DataLoader(random_windows(task), batch_size=task.batch_size):
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bfloat16"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        log.end_step(time.monotonic(), batch.numel(), batch.numel())


if __name__ == "__main__":
    main(sys.argv[1])

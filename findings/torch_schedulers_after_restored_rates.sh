#!/usr/bin/env bash
# Guess: if the states of the optimizer and of its learning rate scheduler are both restored, a
#   resumed run has the learning rates of the run that went on.
#
# Truth: with PyTorch 2.13, that holds only if the scheduler is built before the optimizer's state is
#   restored. Building one multiplies the restored rate by its first factor, the scheduler's
#   load_state_dict does not set it again, and LinearLR and ConstantLR, also in a ChainedScheduler or
#   SequentialLR, go on from the present rate. A run with a warmup from 0.1 that resumes after the
#   warmup trains to its end at about a tenth of its rate. CosineAnnealingLR alone is right.
#
# What a trainer must do: build schedulers before it restores any state, or compute the rate of each
#   step from the number of the step alone; compare the rate of the first resumed step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.optim import lr_scheduler

print("torch", torch.__version__)
STEPS, SAVED = 12, 6


def warmup(optimizer):
    return lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)


def warmup_times_cosine(optimizer):
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return lr_scheduler.ChainedScheduler([warmup(optimizer), cosine])


def warmup_then_cosine(optimizer):
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 4)
    return lr_scheduler.SequentialLR(optimizer, [warmup(optimizer), cosine], [4])


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def run(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
    return rates


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def resumed(make, scheduler_first):
    optimizer = sgd()
    scheduler = make(optimizer)
    run(optimizer, scheduler, SAVED)
    states = optimizer.state_dict(), scheduler.state_dict()
    optimizer = sgd()
    if scheduler_first:
        scheduler = make(optimizer)
        optimizer.load_state_dict(states[0])
    else:
        optimizer.load_state_dict(states[0])
        scheduler = make(optimizer)
    scheduler.load_state_dict(states[1])
    return run(optimizer, scheduler, STEPS - SAVED)


for make in (warmup, warmup_times_cosine, warmup_then_cosine, cosine):
    optimizer = sgd()
    expected = run(optimizer, make(optimizer), STEPS)[SAVED:]
    first, last = resumed(make, True), resumed(make, False)
    print(f"{make.__name__}: {expected}; with a scheduler built last {last}")
    assert first == expected
    if make is cosine:
        assert last == expected
    else:
        pairs = zip(last, expected, strict=True)
        assert all(0.09 < rate / right < 0.13 for rate, right in pairs)
print("as described")
PYTHON

#!/usr/bin/env bash
# Guess: `EMAModel(parameters, decay=0.9999)` averages with 0.9999 from the first step, because
#   `use_ema_warmup` is False by default, as torch.optim.swa_utils.AveragedModel and the papers do.
#
# Truth: in diffusers 0.42 the option only chooses which warm-up: without it, the decay of update n is
#   min(decay, n / (9 + n)), 0 for the first. It reaches 0.999 after 8,991 updates and 0.9999 after
#   89,991, so in a fine-tuning of 1,000 steps the "average" has a decay of at most 0.991 and is nearly the
#   last weights. With `min_decay` equal to `decay`, it is constant from the
#   second update on.
#
# What a trainer must do: state the decay that a step used, and not compare averages of two libraries by
#   the number in their configuration.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 diffusers==0.42.0
cat > "$folder/try.py" <<'PYTHON'
import diffusers
import torch
from diffusers.training_utils import EMAModel

print("diffusers", diffusers.__version__, "torch", torch.__version__)
weight = torch.nn.Parameter(torch.zeros(1))


def decays(steps, **options):
    average = EMAModel([weight], decay=0.9999, **options)
    used = {}
    for step in range(1, max(steps) + 1):
        average.optimization_step = step - 1
        if step in steps:
            average.step([weight])
            used[step] = average.cur_decay_value
    return used


STEPS = (1, 2, 10, 100, 1_000, 8_991, 8_993, 89_980, 89_993, 200_000)
found = decays(STEPS)
for step, decay in found.items():
    print(f"update {step}: decay {decay:.6f}")
    expected = 0.0 if step == 1 else min(0.9999, step / (9 + step))
    assert abs(decay - expected) < 1e-12, expected
assert found[8_991] >= 0.999 and found[1_000] < 0.9911 and found[89_980] < 0.9999 == found[89_993]
assert set(decays((1, 2, 100), min_decay=0.9999).values()) <= {0.0, 0.9999}
torch_average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999)
target, source = [torch.zeros(1)], [torch.ones(1)]
torch_average(target, source, 1)
print("torch, first average:", target[0].item())
assert abs(target[0].item() - 0.0001) < 1e-8
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }

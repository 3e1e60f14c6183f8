#!/usr/bin/env bash
# Guess: `FlowMatchEulerDiscreteScheduler(shift=3.0).set_timesteps(4)` gives the shifted noise levels of
#   Stable Diffusion 3, shift * s / (1 + (shift - 1) * s) of s = 1, 3/4, 1/2, 1/4: 1, 0.9, 0.75, 0.5.
#
# Truth: diffusers 0.42 keeps the smallest level of its 1,000 training levels already shifted (0.003),
#   spaces the steps evenly from 1 down to it, and shifts them again: 1, 0.858, 0.602, 0.009. The last
#   step removes almost nothing, so four steps do the work of three, and the model never sees the levels
#   between 0.6 and 0.009, where it was trained too. `set_timesteps(sigmas=[1, 0.75, 0.5, 0.25])` shifts
#   once and gives the expected levels.
#
# What a trainer must do: pass `sigmas` when it samples from a model for validation, and not measure a
#   schedule by the number of its steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 diffusers==0.42.0
cat > "$folder/try.py" <<'PYTHON'
import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

SHIFT, STEPS = 3.0, 4


def shifted(levels):
    return SHIFT * levels / (1 + (SHIFT - 1) * levels)


print("diffusers", diffusers.__version__)
expected = shifted(torch.tensor([1.0, 0.75, 0.5, 0.25]))
scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
smallest = scheduler.sigmas[-1]
torch.testing.assert_close(smallest, shifted(torch.tensor(1 / 1000)))
scheduler.set_timesteps(STEPS)
by_number = scheduler.sigmas[:STEPS]
torch.testing.assert_close(by_number, shifted(torch.linspace(1, smallest, STEPS)))
scheduler.set_timesteps(sigmas=[1, 0.75, 0.5, 0.25])
by_levels = scheduler.sigmas[:STEPS]
torch.testing.assert_close(by_levels, expected)
for name, levels in {"expected": expected, "by number": by_number, "by sigmas": by_levels}.items():
    print(f"{name}: {[round(level, 3) for level in levels.tolist()]}")
assert by_number[-1] < 0.01 < 0.5 == expected[-1]
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }

#!/usr/bin/env bash
# Guess: TensorBoard's EventAccumulator, with which scripts read curves from event files, returns each
#   value that SummaryWriter.add_scalar wrote.
#
# Truth: tensorboard 2.21 keeps 10,000 values of each name, chosen at random, and says nothing. The first
#   and highest values of a long run may be missing: a spike of the loss, the best step.
#   A mean over the last 100 values spans thousands of steps. (Its page shows 1,000 by default, with
#   `--samples_per_plugin`.) And values are float32: 123,456,789 tokens become 123,456,792.
#
# What a trainer must do: read with `size_guidance={"scalars": 0}`, which keeps all; never find the best step
#   or a spike in the default sample; keep counts of tokens in another file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 tensorboard==2.21.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import sys

import tensorboard
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

print("torch", torch.__version__, "tensorboard", tensorboard.__version__)
N_STEPS = 200_000
writer = SummaryWriter(sys.argv[1])
for step in range(N_STEPS):
    writer.add_scalar("loss", 100 if step in range(50_000, 50_005) else 1, step)
writer.add_scalar("tokens", 123_456_789, N_STEPS)
writer.close()


def read(**options):
    events = EventAccumulator(sys.argv[1], **options)
    events.Reload()
    return events


sampled, whole = read(), read(size_guidance={"scalars": 0})
for name, events in (("default", sampled), ("all", whole)):
    found = events.Scalars("loss")
    spike = [value.step for value in found if value.value > 1]
    print(f"{name}: {len(found)} values, from step {found[0].step}, steps of the spike: {spike}")
assert len(sampled.Scalars("loss")) == 10_000 and len(whole.Scalars("loss")) == N_STEPS
kept = [value.step for value in sampled.Scalars("loss")]
assert sum(step in range(50_000, 50_005) for step in kept) < 5
assert max(value.value for value in whole.Scalars("loss")) == 100
assert kept[-1] == N_STEPS - 1 and kept[-100] < N_STEPS - 1000 and kept[:100] != list(range(100))
tokens = whole.Scalars("tokens")[0].value
print("tokens:", int(tokens))
assert tokens == 123_456_792
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/events"

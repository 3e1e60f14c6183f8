#!/usr/bin/env bash
# Guess: `scheduler.step()` after each `optimizer.step()` moves a learning rate schedule by one step, also
#   for a scheduler that `accelerator.prepare` returned; `len(loader)` of a prepared loader is the number of
#   steps of an epoch, which the schedule's length is computed from.
#
# Truth: accelerate 1.15 steps a prepared scheduler once for each process, unless `split_batches` is set. A
#   schedule over the number of optimizer steps, counted after `prepare` when the loader has its length per
#   process, ends after a half of the run with two processes, and after an eighth with eight: the rest trains
#   with the last rate, here 0. Warmup is as much shorter. With one process, where scripts are tried, all is
#   as written.
#
# What a trainer must do: not pass the scheduler to `prepare` (and not step it in steps that accumulate or
#   that the gradient scaler skips); or set `Accelerator(step_scheduler_with_optimizer=False)`. Plot the
#   rate of a run with several processes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 accelerate==1.15.0
cat > "$folder/try.py" <<'PYTHON'
import accelerate
import torch


def rates(prepare_scheduler=True, **options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(torch.randn(16, 4))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    n_steps = len(loader)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.0, n_steps)
    if prepare_scheduler:
        scheduler = accelerator.prepare(scheduler)
    found = []
    for rows in loader:
        accelerator.backward(model(rows).mean())
        optimizer.step()
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        optimizer.zero_grad()
    return accelerator, n_steps, found


accelerator, n_steps, prepared = rates()
plain = rates(prepare_scheduler=False)[2]
alone = rates(step_scheduler_with_optimizer=False)[2]
if accelerator.is_main_process:
    n_processes = accelerator.num_processes
    print(f"accelerate {accelerate.__version__}, {n_processes} processes, {n_steps} steps: {prepared}")
    expected = [max(0.0, 1 - n_processes * step / n_steps) for step in range(n_steps)]
    assert torch.allclose(torch.tensor(prepared), torch.tensor(expected), atol=1e-6)
    usual = torch.linspace(1, 0, n_steps + 1)[:-1]
    for rates_of_steps in (plain, alone):
        assert torch.allclose(torch.tensor(rates_of_steps), usual, atol=1e-6)
accelerator.end_training()
torch.distributed.is_initialized() and torch.distributed.destroy_process_group()
PYTHON
export OMP_NUM_THREADS=1
for processes in 1 2; do
    "$folder/venv/bin/torchrun" --standalone --nproc-per-node "$processes" "$folder/try.py"
done
echo "as described"

"""Optimizers, and components that act on their steps.

- `optimizer`: the optimizers of a run, their parameter groups and their states.
- `muon`, `adamw_8bit`, `adamw_offload`: single optimizers.
- `lr_scheduler`: schedules of the learning rate.
- `spikes`: finds steps whose loss or gradient norm jumps.
- `ema`: moving average of the weights.
- `freeze`: excludes parameters from training.
"""

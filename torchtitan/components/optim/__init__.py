"""Optimizers, and components that act on their steps.

- `optimizer`: the optimizers of a run, their parameter groups and their states.
- `kinds`: the table of optimizers.
- `muon`, `dion`, `soap`, `schedule_free`, `adamw_few_bits`, `adamw_offload`: single optimizers.
- `qk_clip`: limits attention scores.
- `loss_scale`: factor of the loss in float16.
- `lr_scheduler`: schedules of the learning rate.
- `spikes`: finds steps whose loss or gradient norm jumps.
- `ema`: moving average of the weights.
- `freeze`: excludes parameters from training.
"""

"""Reports of a run about itself.

- `metrics`: the metrics of a step and where they are logged.
- `metric_sinks`: writers of metrics: JSON Lines, TensorBoard, Weights & Biases.
- `run_events`: the events of a run, such as starts, saves and stops.
- `profiling`: traces of steps and snapshots of memory.
"""

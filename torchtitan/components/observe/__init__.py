"""Reports of a run about itself.

- `metrics`: the metrics of a step and where they are logged.
- `metric_sinks`: writers of metrics on disk: JSON Lines, TensorBoard.
- `tracking_sinks`: trackers of experiments: Weights & Biases, MLflow, Trackio.
- `run_files`: names of files in a dump folder.
- `run_events`: the events of a run, such as starts, saves and stops.
- `profiling`: traces of steps and snapshots of memory.
"""

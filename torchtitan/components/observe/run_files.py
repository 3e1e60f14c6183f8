"""Names of files in a dump folder that one part writes and another one reads."""

METRICS = "metrics.jsonl"
"""Metrics of steps."""

COMPLETIONS = "completions.jsonl"
"""Answers that the model of a run has sampled."""

TEXT_SAMPLES = "samples.jsonl"
"""Texts that the model of a run has written at times."""

FORECAST = "forecast.json"
"""The loss that a ladder forecast for the run."""

FORESIGHT = "foresight.json"
"""Time and memory that a dry run predicted."""

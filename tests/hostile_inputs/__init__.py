"""Fuzzing of the torchtitan commands with hostile and damaged input files: `python -m
tests.hostile_inputs`."""

"""Hostile and damaged input files, tried against the commands of torchtitan: `python -m tests.hostile_inputs`."""

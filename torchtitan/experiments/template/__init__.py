"""A training step written out, to be copied and edited: `torchtitan new my_experiment`."""

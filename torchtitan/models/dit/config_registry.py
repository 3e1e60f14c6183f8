"""DiT has no configurations of its own: `--module flow_matching` trains it."""

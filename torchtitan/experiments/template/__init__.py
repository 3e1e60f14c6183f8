"""An experiment: Llama 3 with its own training step."""

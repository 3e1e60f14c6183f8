"""An experiment: Llama 3 with a training step of its own."""

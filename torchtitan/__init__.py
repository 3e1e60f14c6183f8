"""Pre-train and fine-tune language models in native PyTorch, from a laptop CPU to a cluster."""

__version__ = "0.1.0"

"""Low precision and quantization with torchao, an optional dependency."""

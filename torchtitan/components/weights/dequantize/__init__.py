"""Quantized weights of Hugging Face checkpoints, read as floating-point numbers."""

from torchtitan.components.weights.dequantize.methods import (
    DESCRIPTIONS,
    DequantizedSource,
    check_quantization,
    dequantized,
    read_method,
)

__all__ = [
    "DESCRIPTIONS",
    "DequantizedSource",
    "check_quantization",
    "dequantized",
    "read_method",
]

"""Training in, and for, few bits per number: Float8, quantization-aware training, 4-bit weights."""

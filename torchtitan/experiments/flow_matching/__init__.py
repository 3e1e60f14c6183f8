"""Image generation by flow matching (docs/diffusion.md)."""

"""Mixture of experts: router, routed experts, balance of their load, and the layer that combines
them."""

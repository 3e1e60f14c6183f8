"""Reinforcement learning: the model samples answers, and learns from their rewards
(docs/post_training.md)."""

"""Proximal policy optimization: reinforcement learning with a value head on the policy
(docs/post_training.md)."""

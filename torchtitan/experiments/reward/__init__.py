"""Reward models, trained on pairs of answers by the model of Bradley and Terry
(docs/post_training.md)."""

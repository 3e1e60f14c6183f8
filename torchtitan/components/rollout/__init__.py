"""Rollouts (`rollout`) and rewards (`rewards`), for training methods in which the model samples."""

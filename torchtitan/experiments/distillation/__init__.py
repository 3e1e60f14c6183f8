"""Distillation: a student learns the next-token distributions of a teacher
(docs/post_training.md)."""

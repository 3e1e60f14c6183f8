"""Training on pairs of answers to one prompt, or single answers with labels
(docs/post_training.md)."""

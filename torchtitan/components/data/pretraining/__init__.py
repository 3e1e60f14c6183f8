"""Pre-training data: documents as one stream of tokens, cut into windows."""

"""Images in training data: files, rows, and the processors of models."""

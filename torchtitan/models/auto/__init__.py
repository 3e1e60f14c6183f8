"""Training configurations for the model in a Hugging Face folder, of any family."""

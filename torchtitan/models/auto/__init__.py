"""Training configurations for the model in a Hugging Face folder, whatever its family."""

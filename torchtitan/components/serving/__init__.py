"""A server of OpenAI's API over the generation engine."""

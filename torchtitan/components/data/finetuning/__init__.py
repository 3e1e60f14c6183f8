"""Fine-tuning data: rows of a table to conversations, conversations to tokens, tokens to
windows."""

"""Files shipped with the package: a tokenizer, chat templates, and generators of small synthetic
corpora."""

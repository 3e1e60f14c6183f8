"""What comes with the package: a tokenizer, and corpora that a small grammar makes up."""

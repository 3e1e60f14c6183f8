"""Every type of transformers, trained here and compared with its class: `python -m
tests.transformers_matrix`."""

"""Sources of documents and rows: files, saved datasets, the Hugging Face Hub, and embedded data."""

"""Sources of documents and rows: files, saved data sets, the Hugging Face hub, and embedded data."""

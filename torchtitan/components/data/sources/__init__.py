"""Where documents and rows come from: files, saved data sets, the Hugging Face hub, and what is embedded."""

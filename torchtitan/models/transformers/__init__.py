"""Any model that transformers can build, through its own class."""

"""The makers of the bundled demo model: its facts, its tokenizer, its training, its scores."""

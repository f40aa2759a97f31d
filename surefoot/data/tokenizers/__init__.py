"""Text to ids: one file per tokenizer."""

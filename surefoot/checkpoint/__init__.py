"""Checkpoints: staged, hashed, published whole; read without running a line that came with them."""

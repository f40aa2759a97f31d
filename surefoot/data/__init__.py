"""Data: sources, tokenizers, shards, the order, mixing, packing and the loader. numpy only, no torch."""

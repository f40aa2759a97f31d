"""Models built from blocks: the decoder, its presets, its counts and its initialisation."""

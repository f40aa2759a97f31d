"""Compiled passes for CPUs, where PyTorch has none that goes through memory once."""

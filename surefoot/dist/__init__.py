"""Processes and devices: start-up, and what each process knows of its machine."""

"""Observation: the record schema, the run folder and what a person sees. Nothing here imports torch."""

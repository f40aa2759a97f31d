"""Layouts: how one model is spread over ranks, derived from its weights' logical axes."""

"""Optimizers, schedules and clipping: groups by axes, state under logical names."""

"""Studies: anything that runs a model or a training several times and compares."""

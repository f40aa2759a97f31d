"""Job files: the text that hands a run to Slurm, to Kubernetes or to torchrun on each node. One file a target."""

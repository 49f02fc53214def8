"""The loop and what it uses: optimizers, metrics, checkpoints, progress."""

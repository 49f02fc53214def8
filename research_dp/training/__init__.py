"""Training: `loop.train` sets a run up and `trainer.Trainer` drives it, with the other files."""

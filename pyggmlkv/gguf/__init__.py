"""Model files: metadata keys, hyperparameters, and weights in the buffers where they will be used."""

"""Memory: cells and slots (pure NumPy), the tensors behind them, and the caches built from both."""

"""Where graphs run: which devices, which layers on which, and the runner over ggml's scheduler."""

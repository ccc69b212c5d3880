"""Graphs of models on ggml, built against memory's protocol."""

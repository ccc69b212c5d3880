"""Saved states: the byte format, and what reads it into memory and writes it from there."""

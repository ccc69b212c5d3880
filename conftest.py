"""Plugins of the whole test run, whichever part of it is asked for."""

pytest_plugins = ["tests.plugins.backends_used"]

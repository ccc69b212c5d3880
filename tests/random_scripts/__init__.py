"""Random scripts, played on the package and on the reference at once, compared after every step, bit for bit.

`kinds` says over which models and settings, `steps` draws a script from a seed, `resolve` turns a step into something
that may be done now, `play` does it on both sides, `compare` looks at everything, `shrink` makes a failure small.
By hand: python -m tests.random_scripts [KIND ...] [--scripts N] [--first SEED].
"""

"""Build steps for the vendored ggml and the cffi extension; `build_ggml.py` and `setup.py` call them.

Never imported by the installed package. `source` finds ggml, `native` runs CMake, `extension` compiles
pyggmlkv._ggml, `forward` binds backends that are loaded at run time, `info` records what was built,
`declarations` reads C declarations.
"""

from __future__ import annotations


class BuildError(Exception):
    """A build cannot go on; the message says what is missing and what to do about it."""

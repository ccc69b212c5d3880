"""The package's logger: quiet unless the application configures logging. ggml's own log arrives at `pyggmlkv.ggml`."""

from __future__ import annotations

import logging

logger = logging.getLogger("pyggmlkv")
logger.addHandler(logging.NullHandler())
ggml_logger = logging.getLogger("pyggmlkv.ggml")

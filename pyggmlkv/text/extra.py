"""Optional dependencies: imported when first needed, and a clear error when the extra is not installed."""

from __future__ import annotations

import importlib
from typing import Any

from pyggmlkv.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """The imported module. Raises: MissingExtraError naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise MissingExtraError(
            f"{module} is not installed: pip install 'pyggmlkv[{extra}]'", module=module, extra=extra
        ) from cause

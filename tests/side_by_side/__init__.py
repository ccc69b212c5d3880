"""Drives the reference and the package through the same script, step by step, and compares what they say.

The one place beside the tests themselves that knows both sides. scripts/compare_llama.py and the parity tests
use it.
"""

from .cases import CASES, Case, Result, run_case
from .pair import Comparison, Models, Pair, Setup

__all__ = ["CASES", "Case", "Comparison", "Models", "Pair", "Result", "Setup", "run_case"]

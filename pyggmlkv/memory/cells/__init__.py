"""The cells of attention memory as NumPy arrays: the table itself, and what is read off it. Pure."""

from pyggmlkv.memory.cells.table import Cells, CellsCopy

__all__ = ["Cells", "CellsCopy"]

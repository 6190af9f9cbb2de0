"""Where tables are printed."""

from __future__ import annotations

import os

from rich.console import Console

WIDTH = 170
"""Characters of a line that goes into a file or a pipe: no table's cells are cut at that."""


def table_console() -> Console:
    """As wide as the terminal, else as ``COLUMNS`` says, else ``WIDTH``."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)

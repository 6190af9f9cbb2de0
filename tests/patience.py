"""How long a test waits for another process before it takes it for hanging."""

PATIENCE = 400.0
"""Seconds. What takes seconds on an idle machine takes minutes on a busy one; what hangs takes longer."""

"""No balancing: the selection bias stays what it is."""

from __future__ import annotations

from k3train.router.contract import BalanceRule


class NoBalance(BalanceRule):
    """Keeps the bias; loads are still counted by the router."""

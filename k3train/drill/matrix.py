"""Every row of the fault matrix that can be played on a CPU, in the order of its numbers."""

from __future__ import annotations

from k3train.drill.saving import SAVING
from k3train.drill.silent import SILENT
from k3train.drill.stopping import STOPPING
from k3train.drill.watched import WATCHED

ROWS = tuple(sorted((*STOPPING, *SAVING, *SILENT, *WATCHED), key=lambda row: int(row.matrix)))

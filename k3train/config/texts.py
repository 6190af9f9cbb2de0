"""What to write in the place of an empty text: a path or a name that is empty means nothing."""

from __future__ import annotations

_CORPUS = "Give the corpus folder"
_NAME = "Name one, or take the entry out"

FILLED: dict[str, str | None] = {
    "name": "Name the run",
    "dir": "Give a folder",
    "data.sources.*.path": _CORPUS,
    "data.heldout.*": _CORPUS,
    "data.tokenizer": "Give the tokenizer.json that made the corpora, or null to compare none",
    "checkpoint.load_from": "Give a checkpoint folder, or null to begin with new weights",
    "monitor.wandb_project": "Name the project",
    "optim.muon.adamw.*": _NAME,
    "curriculum.order.*": _NAME,
    "resume.override.*": _NAME,
    "cluster.partition": None,
    "cluster.account": None,
}
"""Fix for each text that must not be empty; None for those that may be: Slurm then takes its own."""

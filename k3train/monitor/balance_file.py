"""Histograms and loads of single steps in ``<run>/balance``, to be replayed without a model."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from k3train.config.problems import BadInput

FOLDER = "balance"
_NAME = re.compile(r"step_(\d{8,})\.pipeline_\d{3,}\.npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One step's routers of one pipeline rank; L layers, E experts."""

    layers: NDArray[np.int64]
    """[L] layer numbers, from 1."""
    loads: NDArray[np.int64]
    """[L, E] (token, choice) pairs of the global batch."""
    statistics: NDArray[np.int64]
    """[L, E, n] what the rule collected: the histogram of margins for rule quantile."""
    bias: NDArray[np.float32]
    """[L, E] with which the step's tokens were routed."""
    bounds: NDArray[np.float32]
    """[L, 2] ends of the histograms."""
    top_k: int


def save_step(run_dir: Path, step: int, pipeline_rank: int, saved: Saved) -> None:
    """Write one file, replacing that of an earlier attempt; call it on one rank of each pipeline rank."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.pipeline_{pipeline_rank:03d}.npz"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **{name: getattr(saved, name) for name in Saved.__slots__})
    os.replace(partial, path)


def read_saved(run_dir: Path) -> Iterator[tuple[int, Saved]]:
    """Every saved step in order; a step of several pipeline ranks comes in parts.

    Raises BadInput for a file that ``save_step`` did not write, or of which a part is missing.
    """
    for path in sorted((run_dir / FOLDER).glob("step_*.npz")):
        name = _NAME.fullmatch(path.name)
        saved = _read(path) if name else None
        if name is None or saved is None or not _fits(saved):
            raise BadInput(
                f"{path} is not what monitor.balance.save_every_steps writes, or a part of it is missing: "
                "remove it"
            )
        yield int(name[1]), saved


def _read(path: Path) -> Saved | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in Saved.__slots__}
        top_k = int(arrays.pop("top_k"))
        return Saved(top_k=top_k, **arrays)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, BadZipFile, zlib.error):
        return None


def _fits(saved: Saved) -> bool:
    """Whether all arrays are of the same layers and experts, and of numbers."""
    arrays = saved.layers, saved.loads, saved.statistics, saved.bias, saved.bounds
    if saved.loads.ndim != 2 or saved.statistics.ndim != 3:
        return False
    layers, experts = saved.loads.shape
    shapes = (layers,), (layers, experts), (*saved.loads.shape, saved.statistics.shape[-1])
    return (
        tuple(array.shape for array in arrays) == (*shapes, (layers, experts), (layers, 2))
        and "".join(array.dtype.kind for array in arrays) == "iiiff"
        and 1 <= saved.top_k <= experts
    )

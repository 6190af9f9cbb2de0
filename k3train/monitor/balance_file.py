"""Histograms and loads of single steps in ``<run>/balance``, to be replayed without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = "balance"


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
    """Every saved step in order; a step of several pipeline ranks comes in parts."""
    for path in sorted((run_dir / FOLDER).glob("step_*.npz")):
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in Saved.__slots__}
        top_k = int(arrays.pop("top_k"))
        yield int(path.name.split(".")[0].removeprefix("step_")), Saved(top_k=top_k, **arrays)

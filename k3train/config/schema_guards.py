"""Settings of the guards that watch training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OnNonFinite(Enum):
    """What a step does whose loss or gradient norm is NaN or infinite."""

    stop = "stop"
    """End the run; nothing is updated."""
    skip = "skip"
    """Leave the batch out and go on."""


class OnSpike(Enum):
    """What a step does whose loss or gradient norm is far above those before it."""

    off = "off"
    """Not looked for."""
    warn = "warn"
    """Update all the same, and say so."""
    skip = "skip"
    """Leave the batch out and go on."""
    stop = "stop"
    """End the run; nothing is updated."""
    rollback = "rollback"
    """Go back to the last checkpoint from before the batches that led there, and leave these out."""


@dataclass(kw_only=True, slots=True)
class Guards:
    """What is watched while training, and what happens when something is found."""

    nonfinite: OnNonFinite = OnNonFinite.stop
    spike: OnSpike = OnSpike.warn
    spike_window_steps: int = 64
    """Steps that a loss and a gradient norm are compared with."""
    spike_score: float = 10.0
    """How many robust standard deviations above the window's median make a spike."""
    max_skipped_in_a_row: int = 4
    """The run ends when more steps in a row are skipped."""
    rollback_steps: int = 4
    """Batches that a rollback leaves out: the one with the spike and those before it."""
    max_rollbacks: int = 3
    """The run ends when it would go back more often."""
    rerun: bool = True
    """Compute a bad step again, to tell data from hardware."""
    replay_every_steps: int = 0
    """Compute every so-manieth step twice and compare all bits; 0 never does."""
    digest_every_steps: int = 50
    """Compare digests of weights and optimizer state every so many steps; 0 never does."""
    straggler_every_steps: int = 5
    """Measure each rank's own time every so many steps; 0 never does."""
    straggler_ratio: float = 1.5
    """A rank is slow when its own time is this many times that of its peers."""
    hang_floor_seconds: int = 120
    """A section (setup, step, evaluation, save) is never taken for hanging before this."""
    hang_ceiling_seconds: int = 1800
    """A section that lasts this long hangs; also the limit before there is experience. 0 watches nothing."""

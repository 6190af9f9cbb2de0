"""Open the data of a stage: check it, then serve any step's micro-batch to any rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from k3train.config.schema import Run
from k3train.curriculum.stages import StagePlan
from k3train.data.batch import MicroBatch, Piece
from k3train.data.bookmark import bookmark
from k3train.data.corpus import Corpus
from k3train.data.mix import Stream
from k3train.data.plan import Mark, StageOrder
from k3train.data.prefetch import Prefetch
from k3train.data.sources import assemble, open_corpora, stage_orders
from k3train.faults import point


@dataclass(frozen=True, slots=True)
class Share:
    """One source's part in a stage."""

    source: str
    weight: float
    """Wanted share of tokens."""
    tokens: int
    """Tokens of the stage."""
    share: float
    """Achieved share of tokens, padding left out."""
    epochs: float
    """Passes over the source, from the start of the run to the end of the stage."""


class StageData:
    """The micro-batches of one stage, addressable in any order by any rank. Create with ``open_data``."""

    def __init__(
        self,
        corpora: dict[str, Corpus],
        order: StageOrder,
        stage: StagePlan,
        bookmark: Callable[[Mark], dict[str, Any]],
        prefetch_steps: int,
    ) -> None:
        self._corpora, self._order, self.stage = corpora, order, stage
        self._bookmark, self._prefetch_steps = bookmark, prefetch_steps
        self._pad = next(iter(corpora.values())).pad

    def fingerprint(self) -> str:
        """sha256 of what decides this stage's order; must be equal on all ranks."""
        return self._order.fingerprint()

    def corpora(self) -> dict[str, str]:
        """The text of every source of the run, as a hash."""
        return {name: corpus.fingerprint for name, corpus in self._corpora.items()}

    def inputs(self) -> dict[str, Any]:
        """The plain values behind the fingerprint."""
        return self._order.inputs()

    def bookmark(self, step: int) -> dict[str, Any]:
        """Plain values for a checkpoint after ``step`` steps of the stage: with them ``open_data`` is quick.

        They are not needed to resume; without them the sequences before are planned again.
        """
        return self._bookmark(self._order.mark(step * self.stage.sequences_per_step))

    def micro_batches(self, dp_size: int) -> int:
        """Micro-batches of one step on one data-parallel rank; ValueError when it is not a whole number."""
        group = dp_size * self.stage.stage.micro_batch_sequences
        if self.stage.sequences_per_step % group:
            raise ValueError(
                f"stage {self.stage.name} has {self.stage.sequences_per_step} sequences per step, which do "
                f"not divide over {dp_size} data-parallel ranks in micro-batches of "
                f"{self.stage.stage.micro_batch_sequences}."
            )
        return self.stage.sequences_per_step // group

    def micro_batch(self, step: int, *, dp_rank: int, dp_size: int, index: int) -> MicroBatch:
        """Micro-batch ``index`` of one data-parallel rank in ``step``, counted from the stage's start.

        Rank d holds the d-th of dp_size equal runs of the step's sequences, in order, so the step's sequences
        do not depend on dp_size nor on micro_batch_sequences.
        """
        count = self.micro_batches(dp_size)
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        assert 0 <= index < count, (index, count)
        size = self.stage.stage.micro_batch_sequences
        first = step * self.stage.sequences_per_step + (dp_rank * count + index) * size
        pieces = [self._order.sequence(first + i) for i in range(size)]
        return assemble(self._corpora, pieces, self.stage.stage.context_tokens, self._pad)

    def step(self, step: int, *, dp_rank: int, dp_size: int) -> list[MicroBatch]:
        """All micro-batches of one data-parallel rank in ``step``."""
        count = self.micro_batches(dp_size)
        return [self.micro_batch(step, dp_rank=dp_rank, dp_size=dp_size, index=i) for i in range(count)]

    def documents(self, step: int) -> list[list[Piece]]:
        """The pieces of every sequence of ``step``, of all ranks, without their tokens."""
        first = step * self.stage.sequences_per_step
        return [self._order.sequence(first + i) for i in range(self.stage.sequences_per_step)]

    def steps(self, first_step: int, *, dp_rank: int, dp_size: int) -> Prefetch[list[MicroBatch]]:
        """This rank's micro-batches, step by step to the end of the stage, assembled ahead in a thread.

        Time spent in ``next`` is time that training waited for data. Closing the iterator ends the thread.
        """
        self.micro_batches(dp_size)  # refuses a degree that does not fit here, not in the thread

        def load(step: int) -> list[MicroBatch]:
            point("data.load")
            return self.step(step, dp_rank=dp_rank, dp_size=dp_size)

        return Prefetch(load, range(first_step, self.stage.steps), ahead=self._prefetch_steps)

    def consumed(self, step: int) -> dict[str, int]:
        """Tokens of each source that the stage's first ``step`` steps train on, padding left out."""
        return self._order.consumed(step * self.stage.sequences_per_step)

    def positions(self, step: int) -> dict[str, list[int]]:
        """Where each source of the run stands after the stage's first ``step`` steps: epoch, tokens drawn of
        it, and how many of those were given back because they were not trained on."""
        end = self._order.end(step * self.stage.sequences_per_step)
        return {name: [at.epoch, at.offset, at.returned.tokens] for name, at in sorted(end.items())}

    def shares(self) -> list[Share]:
        """What each source gives to the whole stage; makes the whole plan."""
        used = self.consumed(self.stage.steps)
        end = self._order.end(self.stage.steps * self.stage.sequences_per_step)
        total = max(sum(used.values()), 1)
        return [
            Share(
                source=name,
                weight=weight,
                tokens=used[name],
                share=used[name] / total,
                epochs=self._order.epochs(name, end[name]),
            )
            for name, weight in self._order.weights.items()
        ]

    def close(self) -> None:
        """Close all corpora."""
        for corpus in self._corpora.values():
            corpus.close()


def open_data(
    run: Run, table: Sequence[StagePlan], stage: StagePlan, kept: dict[str, Any] | None = None
) -> StageData:
    """Open all sources, check that they hold enough text for the whole run, and place ``stage`` in it.

    Every stage takes each source on from where the stage before it stopped. A ``kept`` bookmark, of this
    stage or one before, spares a long run the plan of what lies before it; steps before it are then out of
    reach. Raises ConfigError for settings and CorpusError for files, or for a bookmark that was made with
    other text or settings while ``resume.override`` accepts none.
    """
    corpora = open_corpora(run, {name: source.path for name, source in run.data.sources.items()}, "sources")
    try:
        streams = {
            name: Stream(
                name=name,
                corpus_fingerprint=corpora[name].fingerprint,
                lengths=corpora[name].lengths,
                min_document_tokens=source.min_document_tokens,
                max_epochs=source.max_epochs,
                seed=run.seed,
            )
            for name, source in run.data.sources.items()
        }
        order = stage_orders(run, table, stage, streams, kept)[-1]
        return StageData(
            corpora, order, stage, partial(bookmark, run, table, stage, streams), run.data.prefetch_steps
        )
    except BaseException:
        for corpus in corpora.values():
            corpus.close()
        raise

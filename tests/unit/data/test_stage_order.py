"""The plan of a stage: nothing lost, nothing twice, the same for every split and every length of training."""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.data import plan, trail
from k3train.data.batch import Piece
from k3train.data.mix import Exhausted, Pieces, Position, Stream
from k3train.data.order import key_of, keyed_hash, shuffled
from k3train.data.pack import best_fit
from k3train.data.plan import StageOrder
from tests.unit.data.corpora import natural_lengths


def stream(name: str, lengths: list[int], *, shortest: int = 0, epochs: float = 1.0, seed: int = 7) -> Stream:
    return Stream(
        name=name,
        corpus_fingerprint=f"fingerprint of {name}",
        lengths=np.array(lengths, np.int64),
        min_document_tokens=shortest,
        max_epochs=epochs,
        seed=seed,
    )


def stage_order(
    streams: list[Stream],
    weights: dict[str, float],
    context: int,
    *,
    window: int = 0,
    start: dict[str, Position] | None = None,
    seed: int = 7,
) -> StageOrder:
    return StageOrder(
        streams={s.name: s for s in streams},
        weights=weights,
        context_tokens=context,
        pack_window_tokens=window,
        seed=seed,
        start=start or {s.name: Position() for s in streams},
    )


def everything(order: StageOrder) -> list[list[Piece]]:
    """All sequences until a source ends."""
    rows = []
    try:
        while True:
            rows.append(order.sequence(len(rows)))
    except Exhausted:
        return rows


def seen(rows: list[list[Piece]], source: str) -> Counter[tuple[int, int]]:
    """How often each (document, token) of a source occurs."""
    count: Counter[tuple[int, int]] = Counter()
    for row in rows:
        for piece in row:
            if piece.source == source:
                count.update((piece.document, t) for t in range(piece.start, piece.start + piece.length))
    return count


def whole(lengths: list[int], shortest: int = 0) -> dict[tuple[int, int], int]:
    return {(d, t): 1 for d, n in enumerate(lengths) if n >= shortest for t in range(n)}


def test_hash_does_not_change() -> None:
    # These numbers are part of what a checkpoint relies on: no release may give others.
    assert keyed_hash(np.arange(3), 5).tolist() == [
        13168350753275463132,
        7134611160154358618,
        13877614986023876344,
    ]
    assert shuffled(np.arange(8), 1).tolist() == [0, 5, 4, 1, 2, 6, 7, 3]
    assert key_of("a", 1) == 13722700206037900931


@given(
    lengths=st.lists(st.integers(1, 50), min_size=0, max_size=200),
    context=st.integers(50, 90),
)
@settings(max_examples=80)
def test_best_fit_fills_without_overflow(lengths: list[int], context: int) -> None:
    packed, count = best_fit(np.array(lengths, np.int64), context)
    loads = np.bincount(packed, weights=lengths, minlength=count)
    assert len(packed) == len(lengths)
    assert len(loads) == count
    assert (loads <= context).all()
    # Best fit opens a sequence only when a piece fits nowhere: no two sequences could be one.
    if count > 1:
        least = np.sort(loads)[:2]
        assert least.sum() > context


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=60),
    context=st.sampled_from([8, 16, 64]),
    window=st.integers(0, 3000),
    shortest=st.sampled_from([0, 5, 20]),
    seed=st.integers(0, 5),
)
@settings(max_examples=60)
def test_every_token_once_per_epoch(
    lengths: list[int], context: int, window: int, shortest: int, seed: int
) -> None:
    source = stream("a", lengths, shortest=shortest, seed=seed)
    if source.epoch_tokens == 0:
        return
    rows = everything(stage_order([source], {"a": 1.0}, context, window=window, seed=seed))
    assert seen(rows, "a") == whole(lengths, shortest)
    for row in rows:
        assert 0 < sum(p.length for p in row) <= context
        for piece in row:
            # Only documents longer than the context are cut, and then into whole contexts and one rest.
            if lengths[piece.document] <= context:
                assert (piece.start, piece.length) == (0, lengths[piece.document])
            else:
                assert piece.start % context == 0
                assert piece.length == min(context, lengths[piece.document] - piece.start)


@given(data=st.data())
@settings(max_examples=40)
def test_stages_continue_without_repeats_or_losses(data: st.DataObject) -> None:
    """Stages with other contexts, mixes and lengths; two epochs of a source are seen exactly twice."""
    lengths = {
        name: data.draw(st.lists(st.integers(1, 120), min_size=3, max_size=25), label=name) for name in "ab"
    }
    streams = [stream(name, rows, epochs=2) for name, rows in lengths.items()]
    positions = {name: Position() for name in lengths}
    rows: list[list[Piece]] = []
    for context in data.draw(st.permutations([8, 32, 128]), label="contexts"):
        weights = data.draw(st.sampled_from([{"a": 1.0}, {"b": 2.0}, {"a": 1.0, "b": 3.0}]), label="mix")
        order = stage_order(streams, weights, context, start=positions)
        available = everything(order)
        used = data.draw(st.integers(0, len(available)), label="used")
        rows += available[:used]
        positions = order.end(used)
        consumed = order.consumed(used)
        assert consumed == {n: sum(seen(available[:used], n).values()) for n in weights}
    for name, documents in lengths.items():
        count = seen(rows, name)
        epochs = positions[name].epoch + (positions[name].offset - positions[name].returned.tokens) / sum(
            documents
        )
        assert sum(count.values()) == round(epochs * sum(documents))
        assert max(count.values(), default=0) <= np.ceil(epochs - 1e-9)
        # What is left of the first two epochs makes them up.
        left = {name: positions[name]}
        for other in streams:
            left.setdefault(other.name, Position())
        rest = everything(stage_order(streams, {name: 1.0}, 16, start=left))
        assert count + seen(rest, name) == dict.fromkeys(whole(documents), 2)


def test_training_longer_changes_nothing_before() -> None:
    streams = [stream("a", natural_lengths(800)), stream("b", natural_lengths(500, seed=1))]
    order = stage_order(streams, {"a": 2, "b": 1}, 256, window=20_000)
    short = [order.sequence(g) for g in range(40)]
    again = stage_order(streams, {"a": 2, "b": 1}, 256, window=20_000)
    again.end(400)
    assert [again.sequence(g) for g in range(40)] == short
    # Random access from the far end first gives the same.
    fresh = stage_order(streams, {"a": 2, "b": 1}, 256, window=20_000)
    assert [fresh.sequence(g) for g in reversed(range(40))] == short[::-1]


def test_seed_and_corpus_decide_the_order() -> None:
    lengths = natural_lengths(300)

    def first(seed: int = 7, name: str = "a") -> list[Piece]:
        order = stage_order([stream(name, lengths, seed=seed)], {name: 1.0}, 256, seed=seed)
        return [Piece("x", p.document, p.start, p.length) for g in range(20) for p in order.sequence(g)]

    assert first() == first()
    assert first() != first(seed=8)
    assert first() != first(name="b")


def test_shares_follow_the_weights() -> None:
    streams = [stream(n, natural_lengths(4000, seed=i)) for i, n in enumerate("abc")]
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    order = stage_order(streams, weights, 512, window=60_000)
    used = order.consumed(1000)
    total = sum(used.values())
    assert total > 0.97 * 1000 * 512
    for name, weight in weights.items():
        assert abs(used[name] / total - weight) < 0.01


def test_a_small_part_of_a_window_has_the_mix_too() -> None:
    """A stage may train on a few sequences of a large window; chance must not decide its sources."""
    streams = [stream(n, [900] * 400, seed=i) for i, n in enumerate("abc")]
    order = stage_order(streams, {"a": 0.5, "b": 0.25, "c": 0.25}, 1024)
    for sequences in (8, 16, 40):
        used = order.consumed(sequences)
        for name, weight in order.weights.items():
            assert abs(used[name] / 900 - weight * sequences) <= 2


def test_the_emptiest_sequence_of_a_window_comes_last() -> None:
    order = stage_order([stream("a", natural_lengths(3000))], {"a": 1.0}, 4096)
    fill = [sum(p.length for p in order.sequence(g)) for g in range(len(order._planned(0).window))]
    assert fill[-1] == min(fill)
    assert sum(fill[:-1]) > 0.995 * 4096 * (len(fill) - 1)


def test_padding_is_small_and_epoch_ends_do_not_add_to_it() -> None:
    """Sources in proportion to their size end their epochs together; small windows must not follow."""
    streams = [stream(n, natural_lengths(1500, seed=i), epochs=4) for i, n in enumerate("abc")]
    weights = {s.name: float(s.epoch_tokens) for s in streams}
    order = stage_order(streams, weights, 4096)
    rows = everything(order)
    tokens = sum(p.length for row in rows for p in row)
    assert tokens == 4 * sum(s.epoch_tokens for s in streams)
    assert tokens > 0.98 * len(rows) * 4096


def test_max_epochs_is_never_passed_and_a_broken_epoch_ends_at_a_document() -> None:
    lengths = natural_lengths(200, largest=300)
    source = stream("a", lengths, epochs=1.5)
    count = seen(everything(stage_order([source], {"a": 1.0}, 64)), "a")
    assert sum(count.values()) == source.allowed_tokens
    assert 1.3 * sum(lengths) < source.allowed_tokens <= 1.5 * sum(lengths)
    assert set(count.values()) == {1, 2}


def test_an_exhausted_source_is_named() -> None:
    streams = [stream("big", natural_lengths(2000)), stream("small", [50] * 10)]
    order = stage_order(streams, {"big": 0.5, "small": 0.5}, 64)
    with pytest.raises(Exhausted) as error:
        order.end(1000)
    assert error.value.name == "small"


@given(
    lengths=st.lists(st.lists(st.integers(1, 120), min_size=1, max_size=80), min_size=1, max_size=4),
    parts=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    context=st.sampled_from([8, 64, 512]),
    window=st.integers(0, 500),
    epochs=st.sampled_from([1.0, 2.0]),
)
@settings(max_examples=200, deadline=None)
def test_a_stage_gets_what_its_weights_leave_within_max_epochs(
    lengths: list[list[int]], parts: list[int], context: int, window: int, epochs: float
) -> None:
    """However small a source is against the context: its end is drawn at once, ahead of its share."""
    streams = [stream(f"s{i}", each, epochs=epochs) for i, each in enumerate(lengths)]
    weights = {s.name: float(part) for s, part in zip(streams, parts, strict=False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3train.data.plan.MIN_WINDOW_SEQUENCES", 2)
        order = stage_order(streams, weights, context, window=window)
    most = min(s.allowed_tokens / order.weights[s.name] for s in streams)
    served = max(int(most / context) - len(streams) - 1, 0)
    drawn = order.consumed(served)
    assert all(drawn[s.name] <= s.allowed_tokens for s in streams)
    rows = [order.sequence(number) for number in range(served)]
    assert sum(drawn.values()) == sum(piece.length for row in rows for piece in row)


def test_a_source_smaller_than_a_context_lasts_as_long_as_its_share() -> None:
    """Two sources of one epoch in proportion to their size; the stage asks for half of the text."""
    big, small = stream("big", natural_lengths(6000, largest=5000)), stream("small", [100] * 20)
    weights = {s.name: float(s.epoch_tokens) for s in (big, small)}
    order = stage_order([big, small], weights, 4096, window=1000)
    half = (big.epoch_tokens + small.epoch_tokens) // 2 // 4096
    assert order.consumed(half)["small"] <= small.epoch_tokens
    with pytest.raises(Exhausted):
        order.consumed(3 * half)


def test_fingerprint_holds_what_decides_the_order_and_nothing_else() -> None:
    lengths = natural_lengths(300)

    def fingerprint(**change: object) -> str:
        values: dict[str, object] = {"context": 256, "weight": 1.0, "seed": 7, "epochs": 1.0, "shortest": 0}
        values |= change
        source = stream(
            "a",
            lengths,
            seed=values["seed"],  # type: ignore[arg-type]
            epochs=values["epochs"],  # type: ignore[arg-type]
            shortest=values["shortest"],  # type: ignore[arg-type]
        )
        order = stage_order([source], {"a": values["weight"]}, values["context"], seed=values["seed"])  # type: ignore[arg-type,dict-item]
        return order.fingerprint()

    assert fingerprint() == fingerprint(weight=3.0) == fingerprint(epochs=2.0)
    others = [{"context": 512}, {"seed": 8}, {"shortest": 9}, {"epochs": 1.5}]
    assert len({fingerprint(), *(fingerprint(**change) for change in others)}) == 5
    # Having been asked for sequences is no input.
    order = stage_order([stream("a", lengths)], {"a": 1.0}, 256)
    before = order.fingerprint()
    order.end(30)
    assert order.fingerprint() == before
    moved = stage_order([stream("a", lengths)], {"a": 1.0}, 256, start=order.end(30))
    assert moved.fingerprint() != before


def test_returned_pieces_join_again() -> None:
    pieces = Pieces(*(np.array(column) for column in ([3, 3, 3, 5], [0, 10, 30, 0], [10, 10, 5, 7])))
    joined = pieces.merged()
    assert (joined.document.tolist(), joined.start.tolist(), joined.length.tolist()) == (
        [3, 3, 5],
        [0, 30, 0],
        [20, 5, 7],
    )
    assert joined.cut(8).tokens == pieces.tokens
    assert joined.first(22).length.tolist() == [20, 2]


def test_a_long_stage_keeps_few_places_and_finds_every_sequence_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = [stream("a", natural_lengths(4000)), stream("b", natural_lengths(2000, seed=1))]

    def planned() -> StageOrder:
        return stage_order(streams, {"a": 0.7, "b": 0.3}, 64)

    whole, total = planned(), 4000
    expected = [whole.sequence(number) for number in range(total)]

    def ends(order: StageOrder) -> list[list[object]]:
        return [at.values() for number in (1, 63, 777, 2500) for at in order.end(number).values()]

    windows = len(whole._trail)
    monkeypatch.setattr(trail, "LATEST", 4)
    monkeypatch.setattr(trail, "SPREAD", 8)
    order = planned()
    assert [order.sequence(number) for number in range(total)] == expected
    assert len(order._trail) <= 12 < windows
    for number in [*random.Random(3).sample(range(total), 40), 0, total - 1]:
        assert order.sequence(number) == expected[number]
        assert order.mark(number + 1).values() == whole.mark(number + 1).values()
    assert ends(order) == ends(whole)
    again = planned()
    again.go_to(order.mark(total // 2))
    assert [again.sequence(number) for number in range(total // 2, total)] == expected[total // 2 :]
    assert len(again._trail) <= 12


def test_a_stage_that_is_planned_to_its_end_is_walked_without_planning_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a run does: the whole plan first, to see that text suffices; then step by step, and saves behind."""
    monkeypatch.setattr(trail, "LATEST", 6)
    monkeypatch.setattr(trail, "SPREAD", 8)
    made = []
    draw = plan.draw_window
    monkeypatch.setattr(plan, "draw_window", lambda *given, **sizes: made.append(1) or draw(*given, **sizes))
    order = stage_order([stream("a", natural_lengths(20_000))], {"a": 1.0}, 64)
    sequences = 64 * 100
    order.end(sequences)
    windows = len(made)
    assert windows > 50
    for first in (0, sequences // 2):
        order.sequence(first)
        made.clear()
        for number in range(first, first + 64 * 20):
            order.sequence(number)
        assert len(made) <= 22
        made.clear()
        order.consumed(first + 64 * 18)
        order.end(first + 64 * 18)
        assert len(made) <= 2
    for number in random.Random(3).sample(range(sequences), 20):
        made.clear()
        order.sequence(number)
        assert len(made) <= 2 * windows / trail.SPREAD + 2, "places are spread evenly"


def test_a_plan_of_four_times_the_tokens_takes_about_four_times_as_long() -> None:
    """In time of this process's own: what else the machine does is not counted. A plan that looked back at
    all before it would take sixteen times as long."""
    streams = [stream("a", natural_lengths(9000)), stream("b", natural_lengths(3000, seed=1))]

    def seconds(sequences: int) -> float:
        started = time.process_time()
        stage_order(streams, {"a": 0.7, "b": 0.3}, 256, window=16_384).end(sequences)
        return time.process_time() - started

    assert min(seconds(8000) for _ in range(3)) < 8 * min(seconds(2000) for _ in range(3))

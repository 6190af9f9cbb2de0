"""Opening a stage's data: batches for any split of ranks, resume by number, refusals before the start."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from k3train.config.problems import ConfigError
from k3train.config.schema import Run, Source, Stage
from k3train.curriculum.stages import stage_table
from k3train.data.batch import MicroBatch, Piece
from k3train.data.corpus import Corpus
from k3train.data.heldout import heldout
from k3train.data.indexed import CorpusError
from k3train.data.open import StageData, open_data
from k3train.data.plan import changed
from k3train.data.prefetch import Prefetch
from k3train.data.preflight import check_data
from tests.unit.data.corpora import VOCAB, make_corpus, make_run, natural_lengths


@pytest.fixture
def run(tmp_path: Path) -> Run:
    make_corpus(tmp_path / "a", natural_lengths(900))
    make_corpus(tmp_path / "b", natural_lengths(300, seed=1), seed=1)
    make_corpus(tmp_path / "heldout", [*natural_lengths(60, seed=2), 5000], seed=2)
    run = make_run(
        {"a": Source(path=str(tmp_path / "a")), "b": Source(path=str(tmp_path / "b"))},
        {
            "short": Stage(context_tokens=128, tokens=36_864, batch_tokens=1536, mix={"a": 3, "b": 1}),
            "long": Stage(context_tokens=512, tokens=24_576, batch_tokens=6144, mix={"a": 1}),
        },
        pack_window_tokens=16_384,
    )
    run.data.heldout = {"h": str(tmp_path / "heldout")}
    return run


def stage_data(run: Run, index: int = 0) -> StageData:
    table = stage_table(run)
    return open_data(run, table, table[index])


def global_batch(data: StageData, step: int, dp_size: int) -> list[MicroBatch]:
    count = data.micro_batches(dp_size)
    return [
        data.micro_batch(step, dp_rank=rank, dp_size=dp_size, index=index)
        for rank in range(dp_size)
        for index in range(count)
    ]


def test_global_batches_do_not_depend_on_ranks_or_micro_batches(run: Run) -> None:
    reference = None
    for dp_size, micro in [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (12, 1), (1, 4), (2, 3), (3, 4), (1, 12)]:
        run.curriculum.stages["short"].micro_batch_sequences = micro
        data = stage_data(run)
        steps = [global_batch(data, step, dp_size) for step in (0, 7, 23)]
        assert all(len(b.tokens) == micro * 128 for step in steps for b in step)
        got = [
            {
                name: np.concatenate([getattr(b, name) for b in step])
                for name in ("tokens", "labels", "labels_mtp", "valid")
            }
            | {"documents": [p for b in step for p in b.documents]}
            for step in steps
        ]
        reference = reference or got
        for mine, first in zip(got, reference, strict=True):
            assert mine["documents"] == first["documents"]
            for name in ("tokens", "labels", "labels_mtp", "valid"):
                np.testing.assert_array_equal(mine[name], first[name])
        data.close()


def test_tokens_are_those_of_the_documents(run: Run) -> None:
    data = stage_data(run)
    corpora = {n: Corpus(Path(s.path), vocab_size=VOCAB) for n, s in run.data.sources.items()}
    batch = data.micro_batch(5, dp_rank=0, dp_size=1, index=3)
    at = 0
    for piece in batch.documents:
        expected = corpora[piece.source].read(piece.document, piece.start, piece.length)
        np.testing.assert_array_equal(batch.tokens[at : at + piece.length], expected)
        at += piece.length
    assert batch.valid.sum() == at
    assert (batch.tokens[~batch.valid] == 0).all()


def test_resume_needs_only_stage_and_step(run: Run) -> None:
    one = stage_data(run, 1)
    reference = [global_batch(one, step, 1) for step in range(4)]
    other = stage_data(run, 1)
    for step in (3, 1):
        for mine, first in zip(global_batch(other, step, 1), reference[step], strict=True):
            np.testing.assert_array_equal(mine.tokens, first.tokens)
            assert mine.documents == first.documents
    assert other.fingerprint() == one.fingerprint()


def test_a_stage_repeats_nothing_of_the_stage_before(run: Run) -> None:
    seen: set[tuple[str, int, int]] = set()
    for index in range(2):
        data = stage_data(run, index)
        total = 0
        for step in range(data.stage.steps):
            for batch in global_batch(data, step, 1):
                for p in batch.documents:
                    tokens = {(p.source, p.document, t) for t in range(p.start, p.start + p.length)}
                    assert not tokens & seen
                    seen |= tokens
                    total += p.length
        assert sum(data.consumed(data.stage.steps).values()) == total


def test_training_longer_keeps_what_came_before(run: Run) -> None:
    short = stage_data(run)
    run.curriculum.stages["short"].tokens *= 2
    longer = stage_data(run)
    assert longer.fingerprint() == short.fingerprint()
    for step in range(short.stage.steps):
        for a, b in zip(global_batch(short, step, 1), global_batch(longer, step, 1), strict=True):
            assert a.documents == b.documents


def test_steps_prefetches_the_same_batches(run: Run) -> None:
    data = stage_data(run)
    batches = data.steps(20, dp_rank=1, dp_size=2)
    got = list(batches)
    assert len(got) == data.stage.steps - 20
    for step, micro in zip(range(20, 24), got, strict=True):
        expected = [data.micro_batch(step, dp_rank=1, dp_size=2, index=i) for i in range(6)]
        assert [b.documents for b in micro] == [b.documents for b in expected]
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


def test_prefetch_loads_ahead_raises_in_place_and_stops() -> None:
    loaded: list[int] = []

    def load(step: int) -> int:
        loaded.append(step)
        if step == 3:
            raise CorpusError("broken")
        return step

    ahead = Prefetch(load, range(2, 9), ahead=2)
    while len(loaded) < 2:  # pytest's own limit ends a thread that never comes
        time.sleep(0.01)
    assert loaded == [2, 3]
    assert next(ahead) == 2
    with pytest.raises(CorpusError, match="broken"):
        next(ahead)
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


def test_batches_that_do_not_divide_are_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="12 sequences per step, which do not divide over 5"):
        stage_data(run).micro_batches(5)


def test_too_little_text_is_refused_before_the_start(run: Run) -> None:
    run.curriculum.stages["long"].tokens = 6144 * 200
    with pytest.raises(ConfigError) as error:
        stage_data(run, 0)
    (problem,) = error.value.problems
    assert problem.key == "data.sources.a.max_epochs"
    available = Corpus(Path(run.data.sources["a"].path), vocab_size=VOCAB).lengths.sum()
    needed = int(0.75 * 36_864 + 6144 * 200)
    assert f"allows {available:,} tokens" in problem.rule
    assert f"need about {needed:,}" in problem.rule
    run.data.sources["a"].max_epochs = float(problem.fix.split()[3])
    stage_data(run, 0).close()


def test_too_little_text_is_refused_by_weights_when_the_plan_is_long(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3train.data.sources._EXACT_DOCUMENTS", 0)
    exact = [global_batch(stage_data(run, 1), 2, 1)[0].documents]
    assert [global_batch(stage_data(run, 1), 2, 1)[0].documents] == exact
    run.curriculum.stages["long"].tokens = 6144 * 200
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.max_epochs"):
        stage_data(run, 0)


def test_what_changed_is_named() -> None:
    before = {"seed": 1, "sources": {"a": {"corpus": "x", "weight": 0.5}, "b": {}}}
    now = {"seed": 1, "sources": {"a": {"corpus": "y", "weight": 0.5}}}
    assert changed(before, now) == ["sources.a.corpus", "sources.b"]
    assert changed(before, before) == []


@pytest.mark.parametrize(
    ("mix", "key"),
    [
        ({"c": 1.0}, r"stages\.short\.mix\.c = 1\.0 names no source.*one of: a, b"),
        ({"a": -1.0}, r"stages\.short\.mix\.a = -1\.0 is not a weight"),
        ({"a": 0.0}, r"stages\.short\.mix = .* gives no source any weight"),
    ],
)
def test_wrong_mixes_are_refused(run: Run, mix: dict[str, float], key: str) -> None:
    run.curriculum.stages["short"].mix = mix
    with pytest.raises(ConfigError, match=key):
        stage_data(run)


def test_min_document_tokens(run: Run) -> None:
    run.data.sources["b"].min_document_tokens = 400
    run.data.sources["b"].max_epochs = 3
    data = stage_data(run)
    pieces = [p for b in global_batch(data, 3, 1) for p in b.documents if p.source == "b"]
    lengths = Corpus(Path(run.data.sources["b"].path), vocab_size=VOCAB).lengths
    assert pieces
    assert all(lengths[p.document] >= 400 for p in pieces)
    run.data.sources["b"].min_document_tokens = 10**6
    with pytest.raises(
        ConfigError, match=r"data\.sources\.b\.min_document_tokens = 1000000 leaves no document"
    ):
        stage_data(run)


def test_a_source_does_not_drop_out_of_an_unnamed_mix(run: Run) -> None:
    run.curriculum.stages["short"].mix = {}
    run.data.sources["b"].min_document_tokens = 10**9
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.min_document_tokens = 1000000000 leaves"):
        stage_data(run)


def test_shares_are_reported(run: Run) -> None:
    shares = {share.source: share for share in stage_data(run).shares()}
    assert shares["a"].weight == 0.75
    assert abs(shares["a"].share - 0.75) < 0.05
    assert shares["a"].share + shares["b"].share == pytest.approx(1)
    assert 0 < shares["b"].epochs < 1
    run.curriculum.stages["short"].mix = {}
    by_size = {share.source: share.weight for share in stage_data(run).shares()}
    sizes = {n: sum(natural_lengths(c, seed=s)) for n, c, s in [("a", 900, 0), ("b", 300, 1)]}
    assert by_size["a"] == pytest.approx(sizes["a"] / sum(sizes.values()))


def test_all_files_that_are_wrong_are_named_at_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a" / "manifest.json").unlink()
    run.data.sources["b"].path = str(tmp_path / "nowhere")
    with pytest.raises(CorpusError) as error:
        stage_data(run)
    assert f"data.sources.a.path: {tmp_path}/a has no manifest.json" in str(error.value)
    assert f"data.sources.b.path: {tmp_path}/nowhere does not exist; correct the path" in str(error.value)


def test_unsealed_token_files_only_with_permission(run: Run, tmp_path: Path) -> None:
    reference = global_batch(stage_data(run), 3, 1)[0]
    for name in "ab":
        (tmp_path / name / "manifest.json").unlink()
    with pytest.raises(CorpusError, match=r"has no manifest\.json, so it is unfinished"):
        stage_data(run)
    run.data.allow_unsealed = True
    unsealed = global_batch(stage_data(run), 3, 1)[0]
    assert len(unsealed.tokens) == len(reference.tokens)
    assert unsealed.documents != reference.documents  # the fingerprint is weaker, hence another one


def test_another_tokenizer_or_vocabulary_is_refused(run: Run, tmp_path: Path) -> None:
    run.data.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .* is not a file"):
        stage_data(run)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"data\.sources\.a\.path: .* made with another tokenizer"):
        stage_data(run)
    run.data.tokenizer = None
    run.model.vocab_size = VOCAB - 1
    with pytest.raises(CorpusError, match=r"set model\.vocab_size to 5000 or more"):
        stage_data(run)


@pytest.mark.parametrize("context", [64, 512, 4096, 16_384])
def test_heldout_is_deterministic_at_any_context(run: Run, context: int) -> None:
    batches = heldout(run, "h", context, 4)
    again = heldout(run, "h", context, 4)
    assert [b.documents for b in batches] == [b.documents for b in again]
    assert 1 <= len(batches) <= 4
    assert all(len(b.tokens) == context for b in batches)
    documents = [p.document for b in batches for p in b.documents]
    assert len(documents) == len(set(documents))
    if context <= 4096:
        # At least one sequence is the beginning of one document, without padding.
        assert batches[0].documents == [Piece("h", batches[0].documents[0].document, 0, context)]


def test_an_empty_heldout_corpus_is_refused(run: Run, tmp_path: Path) -> None:
    make_corpus(tmp_path / "heldout", [])
    with pytest.raises(CorpusError, match=r"data\.heldout\.h: .* holds no text"):
        heldout(run, "h", 64, 2)


def test_heldout_gives_all_it_has_and_no_more(run: Run) -> None:
    batches = heldout(run, "h", 4096, 1000)
    corpus = Corpus(Path(run.data.heldout["h"]), vocab_size=VOCAB)
    documents = sorted(p.document for b in batches for p in b.documents)
    assert documents == list(range(len(corpus.lengths)))


@pytest.mark.parametrize("way", ["the folder", "another spelling", "a link", "a copy", "a copy, unsealed"])
def test_held_out_text_that_is_trained_on_is_refused(run: Run, tmp_path: Path, way: str) -> None:
    check_data(run)
    other = tmp_path / "elsewhere"
    match way:
        case "the folder":
            other = tmp_path / "b"
        case "another spelling":
            other = tmp_path / "a" / ".." / "b"
        case "a link":
            other.symlink_to(tmp_path / "b")
        case _:
            shutil.copytree(tmp_path / "b", other)
    if way == "a copy, unsealed":
        run.data.allow_unsealed = True
        (other / "manifest.json").unlink()
    run.data.heldout["again"] = str(other)
    with pytest.raises(ConfigError) as refused:
        check_data(run)
    (problem,) = refused.value.problems
    assert problem.key == "data.heldout.again"
    assert f"holds the text of data.sources.b ({tmp_path / 'b'})" in str(problem)

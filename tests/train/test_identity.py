"""Ranks must run on the same code, libraries, settings and text."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.config.schema import Run
from k3train.train.identity import RanksDiffer, check_ranks_agree, code_digest, same_on_every_rank, versions
from tests.ranks import run_ranks


def _what_each_rank_is_told(rank: int) -> list[str]:
    told = []
    for values in (
        {"code": "aa", "torch": "2.11.0"},
        {"code": "aa", "torch": "2.12.0" if rank == 2 else "2.11.0"},
        {"code": "bb" if rank else "aa", "torch": "2.11.0"},
    ):
        try:
            same_on_every_rank(values)
            told.append("")
        except RanksDiffer as error:
            told.append(str(error))
    for seed in (1, rank):
        try:
            check_ranks_agree(Run(seed=seed))
            told.append("")
        except RanksDiffer as error:
            told.append(str(error))
    return told


def test_every_rank_names_the_ranks_that_differ() -> None:
    told = run_ranks(3, _what_each_rank_is_told)
    assert told[0] == told[1] == told[2]
    same, torch, code, equal, settings = told[0]
    assert same == equal == ""
    assert torch.startswith("rank 2 on ")
    assert "differ in torch: 2.12.0, where most ranks have 2.11.0; give all nodes the same" in torch
    assert code.startswith("rank 0 on ")
    assert "differ in code: aa" in code
    assert "differ in settings: " in settings


def test_the_digest_of_the_code_follows_every_source_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import k3train

    digests = [code_digest()]
    monkeypatch.setattr(k3train, "__path__", [str(tmp_path)])
    (tmp_path / "sub").mkdir()
    for path, text in (("a.py", "1"), ("a.py", "2"), ("sub/b.py", ""), ("notes.txt", "")):
        (tmp_path / path).write_text(text)
        digests.append(code_digest())
    assert len(set(digests)) == 4
    assert digests[-1] == digests[-2], "only code counts"


def test_versions_hold_the_tokenizer_s_hash(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("1")
    (tmp_path / "two.json").write_text("2")
    one, two = (versions(str(tmp_path / name)) for name in ("one.json", "two.json"))
    assert one["tokenizer"] != two["tokenizer"]
    assert {**one, "tokenizer": ""} == {**two, "tokenizer": ""}
    assert versions("")["tokenizer"] == "none"
    assert {"code", "torch", "megatron-core"} <= one.keys()

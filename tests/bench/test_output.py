"""The file that ``k3train bench`` writes, and when a benchmark has failed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from k3train.__main__ import main
from k3train.bench.items import OURS
from k3train.bench.output import claimed
from k3train.bench.record import LATE, MEASURED, Record, Row, own_trouble, read_record
from k3train.bench.table import print_record
from k3train.bench.worker import FORWARD
from k3train.config.problems import Unavailable


def test_no_file_is_replaced_and_none_is_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("mine")
    (tmp_path / "a-2.json").symlink_to("nowhere")
    with claimed(None, "a") as first, claimed(None, "a") as second:  # both at once, and nothing written yet
        assert (str(first), str(second)) == ("a-3.json", "a-4.json")
        Record(made={}).write(first)
        assert read_record(first).rows == []
    assert sorted(os.listdir()) == ["a-2.json", "a-3.json", "a.json"]
    assert (tmp_path / "a.json").read_text() == "mine"


def test_a_file_that_does_not_exist_is_answered_with_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "show", str(tmp_path / "no.json")]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}/no.json does not exist; give a file that k3train bench --out has written\n"
    )


def test_a_place_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out, reason in (("file/a.json", "file is no folder"), (f"{300 * 'a'}.json", "File name too long")):
        command = ["bench", "situ", "--device", "cpu", "--peers", "none", "--out", str(tmp_path / out)]
        assert main(command) == 3
        printed, err = capsys.readouterr()
        assert printed == ""
        assert f"{out} cannot be written: " in err
        assert err.endswith(f"{reason}; give a file that can be with --out\n")


def test_a_file_that_cannot_be_written_later_is_named_itself(tmp_path: Path) -> None:
    out = tmp_path / "gone" / "a.json"
    with pytest.raises(Unavailable, match=r"gone/a\.json cannot be written: No such file or directory; give"):
        Record(made={}).write(out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["situ", "--item-seconds", "0.01"], "did not end within 0.01 s); give more with --item-seconds"),
        (["situ", "--shape", "rows=999999999999"], "out of memory: 255999999999744 bytes more were needed)"),
        (["situ", "--budget", "0.01"], "--budget 0.01 was over before anything was measured"),
        (["kda", "--audit", "--shape", "heads=99999999"], "head_dim=32 could not be audited: out of memory"),
    ],
)
def test_measuring_nothing_of_its_own_is_no_success(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    assert main(["bench", *arguments, "--device", "cpu", "--peers", "none", "--out", str(out)]) == 3
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert out.is_file() == words.endswith(("--item-seconds", "needed)"))  # else there are no rows


def test_one_measured_row_of_its_own_is_enough() -> None:
    rows = [
        Row(
            item="situ",
            shape={},
            by=by,
            what=FORWARD,
            status=status,
            reason="r" if status != MEASURED else "",
        )
        for by, status in (("megatron", MEASURED), (OURS, LATE))
    ]
    trouble = own_trouble(Record(made={}, rows=rows))
    assert trouble == "nothing of k3train's own could be measured (r); give more seconds with --budget"
    rows.append(replace(rows[0], by=OURS))
    assert own_trouble(Record(made={}, rows=rows)) == ""


def test_small_rates_have_digits(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        item="situ", shape={"rows": 4}, by=OURS, what=FORWARD, status=MEASURED, ms=1.0, low=1.0, high=1.0
    )
    row.gb_s, row.tflop_s = 0.0223, 1234.4
    print_record(Record(made={}, rows=[row]), Console(width=170))
    assert {"0.0223", "1,234"} <= set(capsys.readouterr().out.split())

"""The one reader of JSON files."""

from __future__ import annotations

from pathlib import Path

import pytest

import k3train
from k3train.config.json_file import parse_json, read_json
from k3train.config.problems import BadInput

FIX = "write it again"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_json_is_named_with_its_fix(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        read_json(path, BadInput, FIX)
    assert str(refused.value).startswith(f"{path} cannot be read as JSON: ")
    assert str(refused.value).endswith(f"; {FIX}")
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"."):
        parse_json(content)


def test_a_missing_file_is_its_reader_s_to_judge_and_a_folder_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "gone.json", BadInput, FIX)
    with pytest.raises(BadInput, match=f"^{tmp_path} cannot be read: Is a directory; {FIX}$"):
        read_json(tmp_path, BadInput, FIX)


def test_files_are_read_in_no_other_way() -> None:
    """``bench`` and ``drill`` read what processes of their own have written; all else goes through it."""
    package = Path(k3train.__file__ or "").parent
    files = {file.relative_to(package).as_posix(): file.read_text() for file in package.rglob("*.py")}
    own = ("bench/", "drill/")
    using = [name for name, text in files.items() if "json.load" in text and not name.startswith(own)]
    assert using == ["config/json_file.py"]

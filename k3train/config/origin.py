"""Which file set a key, for problems in files; asked only when there is a problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from k3train.config.files import read_mapping


def file_of(key: str, directory: Path, config_name: str, selections: list[str]) -> str | None:
    """File below the configuration folder that sets ``key`` last, or None when none does.

    ``selections`` are the overrides that select files, such as ``model=k3``.
    """
    with initialize_config_dir(str(directory), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        merged = loader.compute_defaults_list(config_name, overrides=selections, run_mode=RunMode.RUN)
    for item in reversed(merged.defaults):
        file = directory / f"{item.config_path}.yaml"
        package = item.package or ""
        if file.is_file() and _sets(
            read_mapping(file)[0], key.removeprefix(f"{package}." if package else "")
        ):
            return str(file.relative_to(directory))
    return None


def _sets(tree: object, path: str) -> bool:
    """Whether a file's ``tree`` holds the key, or refers for it to another."""
    if not path or (isinstance(tree, str) and "${" in tree):
        return True
    entries: Iterable[tuple[object, object]] = ()
    if isinstance(tree, Mapping):
        entries = cast("Mapping[object, object]", tree).items()
    elif isinstance(tree, list):
        entries = enumerate(cast("list[object]", tree))
    for name, value in entries:  # a key in a file may be a number or have dots
        if f"{path}.".startswith(f"{name}.") and _sets(value, path[len(str(name)) + 1 :]):
            return True
    return False

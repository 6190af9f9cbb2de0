"""What a start runs on (code, libraries, tokenizer, settings), and whether all ranks run on the same."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

import k3train
from k3train.config.compose import to_yaml
from k3train.config.problems import BadInput
from k3train.config.schema import Run
from k3train.data.corpus import file_sha256

_DIGITS = 16


class RanksDiffer(BadInput):
    """Ranks of one run have other code, libraries, settings or text; the message says which ranks."""


@cache
def versions(tokenizer: str | None) -> dict[str, str]:
    """What a checkpoint records of the programs that wrote it; ``tokenizer`` is a file, or None.

    Another version on resume is no error, but is said.
    """
    return {
        "code": code_digest(),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "python": platform.python_version(),
        "tokenizer": file_sha256(Path(tokenizer))[:_DIGITS] if tokenizer else "none",
    }


def code_digest() -> str:
    """Digest of every source file of the package as it lies on this machine's disk."""
    (folder,) = k3train.__path__
    hasher = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*.py")):
        hasher.update(f"{path.relative_to(folder)}\n".encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:_DIGITS]


def check_ranks_agree(run: Run) -> None:
    """Compare code, libraries, tokenizer and settings over all ranks. Every rank must call this.

    Raises RanksDiffer, on every rank, naming the ranks that differ from most.
    """
    settings = hashlib.sha256(to_yaml(run).encode()).hexdigest()[:_DIGITS]
    same_on_every_rank({**versions(run.data.tokenizer), "settings": settings})


def same_on_every_rank(own: dict[str, str]) -> None:
    """Raise RanksDiffer on every rank when a value is not the same everywhere. Every rank must call this."""
    seen: list[tuple[str, dict[str, str]]] = [("", {})] * dist.get_world_size()
    dist.all_gather_object(seen, (socket.gethostname(), own))
    for what in own:
        values = [each[what] for _, each in seen]
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            hosts = sorted({seen[rank][0] for rank in odd})
            named = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:8]))}"
            more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
            raise RanksDiffer(
                f"{named}{more} on {', '.join(hosts[:4])} differ in {what}: {values[odd[0]]}, where "
                f"most ranks have {usual}; give all nodes the same checkout, environment and files."
            )

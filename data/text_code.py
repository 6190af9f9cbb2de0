"""Python source that is installed already: PyTorch and the standard library.

A directory's files laid end to end, each under its path, make one document: that is where long documents come
from. The standard library's top-level modules are a document each.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sysconfig
from pathlib import Path

from texts import Text, capped

CODE_BYTES = 3_500_000
MAX_DIRECTORY_BYTES = 1_200_000
TORCH = ("nn", "optim", "autograd", "distributions", "fx", "utils/data", "distributed/optim")
STDLIB = (
    "asyncio",
    "concurrent",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "unittest",
    "urllib",
    "xml",
)
SKIPPED = {"test", "tests", "testing", "__pycache__", "site-packages", "idle_test"}


def code() -> list[Text]:
    """Source code from PyTorch and the standard library."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    python = (f"Python {platform.python_version()} (standard library)", "PSF-2.0")
    texts = [Text(*python, p.name, _read(p)) for p in sorted(stdlib.glob("*.py"))]
    for name in STDLIB:
        texts += directories(stdlib, name, *python)
    torch = package_folder("torch")
    if torch is not None:
        origin = f"torch {importlib.metadata.version('torch')}"
        for name in TORCH:
            texts += directories(torch.parent, f"torch/{name}", origin, "BSD-3-Clause")
    return capped(texts, CODE_BYTES)


def directories(root: Path, name: str, origin: str, licence: str) -> list[Text]:
    """One document for each directory under root/name: its own .py files in the order of their names."""
    texts = []
    top = root / name
    for folder in sorted(p for p in [top, *top.rglob("*")] if p.is_dir()):
        inside = folder.relative_to(root)
        if SKIPPED & set(inside.parts):
            continue
        files = [p for p in sorted(folder.glob("*.py")) if p.stat().st_size]
        text = "\n\n".join(f"# {p.relative_to(root)}\n\n{_read(p).strip()}" for p in files)
        if len(text) <= MAX_DIRECTORY_BYTES:
            texts.append(Text(origin, licence, str(inside), text))
    return texts


def package_folder(name: str) -> Path | None:
    """Where a package is installed, found without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")

"""Text without a network: documentation written inside installed packages."""

from __future__ import annotations

import ast
import importlib.metadata
import sysconfig
from pathlib import Path

from text_code import SKIPPED, package_folder
from text_docs import python_reference
from texts import Text, capped

PROSE_BYTES = 4_000_000
README_BYTES = 1_500_000
PACKAGES = {
    "numpy": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
}


def offline_prose() -> list[Text]:
    """Docstrings of installed packages and of the standard library: one document a directory."""
    roots = [(Path(sysconfig.get_paths()["stdlib"]), "Python (docstrings)", "PSF-2.0")]
    for name, licence in PACKAGES.items():
        folder = package_folder(name)
        if folder is not None:
            roots.append((folder, f"{name} {importlib.metadata.version(name)} (docstrings)", licence))
    texts: list[Text] = []
    for root, origin, licence in roots:
        parts: dict[str, list[str]] = {}
        total = 0
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if SKIPPED & set(inside.parts):
                continue
            if total > PROSE_BYTES / len(roots):
                break
            found = docstrings(path)
            total += len(found)
            if found:
                parts.setdefault(str(inside.parent), []).append(f"# {inside}\n\n{found}")
        texts += [Text(origin, licence, name, "\n\n".join(found)) for name, found in parts.items()]
    return capped(texts, PROSE_BYTES)


def offline_docs() -> list[Text]:
    """Python's language reference and the descriptions of all installed packages."""
    texts = python_reference()
    for package in sorted(importlib.metadata.distributions(), key=lambda d: str(d.metadata["Name"]).lower()):
        about = package.metadata
        body = about.get_payload()
        licence = (
            about["License-Expression"] or (about["License"] or "").split("\n")[0][:60] or "see its package"
        )
        if isinstance(body, str) and "NVIDIA" not in licence:
            texts.append(Text(f"{about['Name']} {package.version} (description)", licence, "README", body))
    return [*texts[: len(python_reference())], *capped(texts[len(python_reference()) :], README_BYTES)]


def docstrings(path: Path) -> str:
    """All docstrings of a module, each under the name it documents."""
    source = path.read_text(encoding="utf-8", errors="replace")
    if '"""' not in source:
        return ""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 60:
                found.append(f"## {getattr(node, 'name', path.stem)}\n\n{text}")
    return "\n\n".join(found)

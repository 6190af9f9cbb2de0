"""Technical documentation: Django's manual and Python's language reference."""

from __future__ import annotations

import tarfile
from pathlib import Path
from pydoc_data import topics

from texts import Text, capped

DJANGO_BYTES = 2_500_000


def docs(downloads: dict[str, Path]) -> list[Text]:
    """Documentation from the downloaded packages and from Python itself."""
    return [*capped(django(downloads["django"]), DJANGO_BYTES), *python_reference()]


def django(archive: Path) -> list[Text]:
    """One document a page of the manual."""
    texts = []
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            path = member.name.split("/", 1)[-1]
            file = tar.extractfile(member) if path.startswith("docs/") and path.endswith(".txt") else None
            if file is not None:
                text = file.read().decode("utf-8", errors="replace")
                texts.append(Text("django 6.1.3 (docs)", "BSD-3-Clause", path, text))
    return texts


def python_reference() -> list[Text]:
    """The language reference that Python's help() shows, one document a topic."""
    return [
        Text("Python (language reference)", "PSF-2.0", name, text)
        for name, text in sorted(topics.topics.items())
    ]

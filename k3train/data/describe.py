"""What ``k3train data verify`` and ``k3train data show`` print of a corpus."""

from __future__ import annotations

from pathlib import Path

from k3train.data.corpus import check_sizes, read_manifest, verify


def verified(folder: Path) -> str:
    """One line of a corpus whose every byte is as its manifest says; raises CorpusError of any other."""
    manifest = verify(folder)
    return (
        f"OK  {folder}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, every file as written"
    )


def described(folder: Path) -> str:
    """What the manifest of a corpus tells, a line each, once the sizes of its files are checked.

    Raises CorpusError.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    special = ", ".join(f"{name} {token}" for name, token in manifest.special.items())
    lines = {
        "documents": f"{manifest.documents:,}, the longest of {manifest.longest_document_tokens:,} tokens",
        "tokens": f"{manifest.tokens:,}",
        "text": f"{manifest.text_bytes:,} bytes" if manifest.text_bytes else "not known",
        "vocabulary": f"{manifest.vocab_size:,} ids, of them {special}",
        "tokenizer": f"sha256 {manifest.tokenizer_sha256}",
        "built by": manifest.command,
        **{f"licence of {origin}": licence for origin, licence in manifest.licences.items()},
        **{name: f"{known['bytes']:,} bytes" for name, known in manifest.files.items()},
    }
    width = max(map(len, lines))
    return "\n".join(
        [f"{manifest.name}", *(f"  {name.ljust(width)}  {text}" for name, text in lines.items())]
    )

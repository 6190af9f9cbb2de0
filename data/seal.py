#!/usr/bin/env python3
"""Seal token files that another program wrote, or check sealed ones: ``python data/seal.py --help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3train.config.problems import BadInput
from k3train.data.corpus import Manifest, file_sha256, seal, verify
from k3train.data.indexed import CorpusError
from k3train.data.tokenizer import read_tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Command line; 2 with one sentence on stderr when a corpus or the tokenizer is not what it should be, 3
    when a corpus cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python data/seal.py",
        description="Write the manifest and checksums of folders with tokens.bin and tokens.idx (Megatron's "
        "format), or with --verify check every hash of folders that have them.",
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--verify", action="store_true", help="check, write nothing")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json that made the tokens")
    parser.add_argument(
        "--pad", default="<|pad|>", help="the tokenizer's padding token (default: %(default)s)"
    )
    parser.add_argument(
        "--bos", default="<|bos|>", help="token that begins a document (default: %(default)s)"
    )
    parser.add_argument("--eod", default="<|eod|>", help="token that ends a document (default: %(default)s)")
    parser.add_argument("--licence", default="not stated", help="licence of the text")
    options = parser.parse_args(arguments)
    if not options.verify and options.tokenizer is None:
        parser.error("--tokenizer is needed to seal")
    code = 0
    for folder in options.folders:
        try:
            manifest = verify(folder) if options.verify else _seal(folder, options)
            print(f"{folder}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, all hashes match")
        except (BadInput, OSError) as error:
            print(error, file=sys.stderr)
            code = max(code, 2 if isinstance(error, BadInput) else 3)
    return code


def _seal(folder: Path, options: argparse.Namespace) -> Manifest:
    tokenizer = read_tokenizer(options.tokenizer, f"--tokenizer {options.tokenizer}")
    special = {}
    for name in ("pad", "bos", "eod"):
        number = tokenizer.token_to_id(getattr(options, name))
        if number is None:
            raise CorpusError(
                f"{options.tokenizer} has no token {getattr(options, name)}; name its own: --{name}"
            )
        special[name] = number
    return seal(
        folder,
        tokenizer_sha256=file_sha256(options.tokenizer),
        vocab_size=tokenizer.get_vocab_size(),
        special=special,
        licences={folder.name: options.licence},
        command="python data/seal.py",
    )


if __name__ == "__main__":
    sys.exit(main())

"""Fetch the packages of packages.txt with pip; nothing is installed."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
from pathlib import Path

PACKAGES = Path(__file__).with_name("packages.txt")


class NoNetwork(Exception):
    """The packages cannot be had here; the message says why in a few words."""


class WrongHash(Exception):
    """A package is not the one that packages.txt names."""


def packages() -> dict[str, str]:
    """sha256 of each package by its name."""
    lines = [line.split() for line in PACKAGES.read_text().splitlines() if line and not line.startswith("#")]
    return {spec.split("==")[0]: hash_.removeprefix("--hash=sha256:") for spec, hash_ in lines}


def download(folder: Path) -> dict[str, Path]:
    """The archive of each package, from ``folder`` where it lies there already.

    Raises NoNetwork, WrongHash, or OSError when the disk is full.
    """
    wanted = packages()
    found = _present(folder, wanted)
    if len(found) == len(wanted):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    # Django's manual is only in its source archive, for which pip asks Django's build backend for its name.
    # The setuptools that torch brings will do; without it pip makes an isolated one, which takes longer.
    error = _pip(folder, "--no-build-isolation")
    if "BackendUnavailable" in error or "No module named 'setuptools'" in error:
        error = _pip(folder)
    if "DO NOT MATCH THE HASHES" in error:
        raise WrongHash(f"pip was given other files than {PACKAGES} names:\n{error.strip()[-600:]}")
    if "No space left" in error:
        raise OSError(errno.ENOSPC, "no space left on the disk", str(folder))
    if "No module named pip" in error:
        raise NoNetwork("pip is not installed in this environment")
    if error:
        lines = [line.removeprefix("ERROR: ") for line in error.splitlines() if line.startswith("ERROR")]
        raise NoNetwork(f"pip: {(lines or error.strip().splitlines())[-1]}")
    return _present(folder, wanted)


def _pip(folder: Path, *options: str) -> str:
    """Run pip download; its complaints, or nothing when it went well."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "django", *options, "--require-hashes", "--retries", "1", "--timeout", "10"]
    command += ["--requirement", str(PACKAGES), "--dest", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    return (result.stderr or f"pip ended with code {result.returncode}") if result.returncode else ""


def _present(folder: Path, wanted: dict[str, str]) -> dict[str, Path]:
    """Archives with a wanted hash; an archive of a wanted name with another hash is removed."""
    found = {}
    for path in sorted(folder.glob("*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        for name, sha256 in wanted.items():
            if digest == sha256:
                found[name] = path
            elif path.name.lower().replace("_", "-").startswith(f"{name}-"):
                path.unlink()
    return found

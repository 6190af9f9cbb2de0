"""launch/env.sh: which Python is taken, when the environment is made again, and what failures say.

The Pythons on the search path are real programs in an otherwise empty world: the tests' own Python behind a
changed version, or a script that breaks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = ROOT / "launch" / "env.sh"
TOOLS = "awk bash cat cut df dirname flock grep head ls mkdir rm sed sha256sum sort tail tee touch".split()

# Answers what is asked of any Python, and makes environments quickly: pip is shared, not copied.
# Its first lines are sh and Python at once, because a #! line cannot name a path with a space.
PYTHON_OF_VERSION = """#!/bin/sh
''''exec "{python}" "$0" "$@" #'''
import glob, os, subprocess, sys
if sys.argv[1] != "-E":
    subprocess.run(["{python}", *sys.argv[1:3], "--without-pip", *sys.argv[3:]], check=True)
    with open(glob.glob(sys.argv[3] + "/lib/python*/site-packages")[0] + "/shared.pth", "w") as file:
        file.write("{packages}")
    sys.exit()
sys.version_info = ({version})
{hide}
code, sys.argv = sys.argv[3], ["-c", *sys.argv[4:]]
exec(code)
"""


class World:
    """A home, a search path and a copy of the checkout's two pinned files, with nothing else in reach."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "search path"
        self.tools = folder / "tools"
        self.home = folder / "home"
        self.root = folder / "check out"
        for new in (self.path, self.tools, self.home, self.root / "launch"):
            new.mkdir(parents=True)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is needed by this test"
            (self.tools / tool).symlink_to(found)
        for name in ("pyproject.toml", "constraints.txt", "launch/env.sh"):
            shutil.copy(ROOT / name, self.root / name)
        self.venv = self.root / ".venv"

    def python(self, where: Path, version: str = "3, 12", *, venv: bool = True) -> Path:
        """Put a Python that says it is ``version`` at ``where``."""
        hide = "" if venv else "sys.modules['ensurepip'] = None"
        text = PYTHON_OF_VERSION.format(
            python=sys.executable, version=version, hide=hide, packages=sysconfig.get_path("purelib")
        )
        return self.program(where, text)

    def broken(self, where: Path) -> Path:
        """Put a program at ``where`` that fails as pyenv's shim for a version that is not selected."""
        return self.program(where, "#!/bin/sh\necho 'command not found' >&2\nexit 127\n")

    def program(self, where: Path, text: str) -> Path:
        """Put an executable script at ``where``."""
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
        where.chmod(0o755)
        return where

    def bash(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``code`` after sourcing env.sh, from another folder."""
        environment = {"PATH": f"{self.path}:{self.tools}", "HOME": str(self.home), **variables}
        command = f"set -euo pipefail; source '{self.root}/launch/env.sh'; {code}"
        return subprocess.run(
            ["bash", "-c", command],
            env=environment,
            cwd=self.home,
            text=True,
            capture_output=True,
            timeout=200,
        )

    def found(self, **variables: str) -> str:
        """The Python that the search takes, or what it says of those it rejected."""
        result = self.bash('find_python; echo "${FOUND:-none: $REJECTED}"', **variables)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_order_is_variable_then_path_then_pyenv(world: World) -> None:
    in_pyenv = world.python(world.home / ".pyenv/versions/3.12.1/bin/python")
    assert world.found() == str(in_pyenv)
    on_path = world.python(world.path / "python3.13", "3, 13")
    assert world.found() == str(on_path)
    plain = world.python(world.path / "python3")
    assert world.found() == str(plain)
    wanted = world.python(world.home / "my pythons" / "python")
    assert world.found(PYTHON=str(wanted)) == str(wanted)


def test_pyenv_versions_are_found_below_their_own_root(world: World) -> None:
    for patch in ("3.13.2", "3.12.3", "3.12.11", "3.11.7"):
        world.python(world.home / "elsewhere/versions" / patch / "bin/python", patch.replace(".", ", "))
    expected = world.home / "elsewhere/versions/3.12.11/bin/python"
    assert world.found(PYENV_ROOT=str(world.home / "elsewhere")) == str(expected)


def test_pythons_that_cannot_serve_are_passed_over_and_named(world: World) -> None:
    world.python(world.path / "python3", "3, 11")
    world.broken(world.path / "python3.12")
    world.python(world.path / "python3.13", "3, 13", venv=False)
    world.python(world.path / "python3.14", "3, 15")
    assert world.found(PYTHON="/no/such/python").removeprefix("none: ").split(", ") == [
        "PYTHON=/no/such/python does not exist",
        f"{world.path}/python3 is Python 3.11",
        f"{world.path}/python3.12 does not run",
        f"{world.path}/python3.13 is Python 3.13 without the venv module",
        f"{world.path}/python3.14 is Python 3.15",
    ]


def test_a_second_python3_further_down_the_path_is_found(world: World) -> None:
    world.broken(world.path / "python3")
    good = world.python(world.tools / "python3")
    assert world.found() == str(good)


def test_the_environment_that_is_being_replaced_is_not_its_own_source(world: World) -> None:
    world.python(world.venv / "bin/python3")
    result = world.bash('find_python; echo "${FOUND:-none}"', PATH=f"{world.venv}/bin:{world.tools}")
    assert result.stdout.strip() == "none"


def test_no_python_at_all_is_one_sentence(world: World) -> None:
    world.python(world.path / "python3", "3, 9")
    result = world.bash("prepare_environment")
    assert result.returncode == 1
    assert result.stderr == (
        f"k3train: no usable Python 3.12, 3.13, 3.14 found ({world.path}/python3 is Python 3.9): install one "
        "(Debian, Ubuntu: apt install python3.12-venv) or uv, or set PYTHON to its path.\n"
    )


def test_uv_makes_the_environment_only_when_no_python_does(world: World) -> None:
    make = f'while [ $# -gt 1 ]; do shift; done; exec "{sys.executable}" -m venv --without-pip "$1"'
    world.program(world.path / "uv", f'#!/bin/sh\necho "uv $*" >> "{world.home}/calls"\n{make}\n')
    calls = world.home / "calls"
    assert world.bash("make_venv").returncode == 0
    assert calls.read_text() == f"uv venv --quiet --seed --python 3.12 {world.venv}\n"
    assert (world.venv / "pyvenv.cfg").exists()

    calls.unlink()
    world.python(world.path / "python3")
    result = world.bash("make_venv")
    assert f"with {world.path}/python3" in result.stdout
    assert not calls.exists()


# From here on the environment is a real one, and only the packages are left out.
PREPARE = 'install_packages() { echo "packages installed"; }; prepare_environment'


@pytest.fixture
def made(world: World) -> World:
    world.python(world.path / "python3")
    result = world.bash(PREPARE)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "packages installed" in result.stdout
    return world


def test_an_environment_is_kept_until_its_pins_its_python_or_its_folder_change(made: World) -> None:
    assert made.bash(PREPARE).stdout == ""

    with open(made.root / "constraints.txt", "a") as file:
        file.write("# changed\n")
    changed = made.bash(PREPARE).stdout
    assert "packages installed" in changed
    assert "making it again" not in changed
    assert made.bash(PREPARE).stdout == ""

    (made.venv / "bin/python").unlink()
    made.python(made.venv / "bin/python", "3, 10")
    made.venv.joinpath("k3train.stamp").unlink()
    assert "has a Python that is Python 3.10: making it again" in made.bash(PREPARE).stdout

    (made.venv / "bin/python").unlink()
    made.broken(made.venv / "bin/python")
    assert "has a Python that does not run: making it again" in made.bash(PREPARE).stdout

    moved = made.root.rename(made.root.with_name("moved"))
    made.root, made.venv = moved, moved / ".venv"
    assert "was made for another folder: making it again" in made.bash(PREPARE).stdout
    assert made.bash(PREPARE).stdout == ""


def test_a_folder_that_is_no_environment_is_left_alone(world: World) -> None:
    world.python(world.path / "python3")
    precious = world.home / "thesis" / "chapter1.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    result = world.bash(PREPARE, K3TRAIN_VENV=str(precious.parent))
    assert result.returncode == 1
    assert "is not a virtual environment: move it away" in result.stderr
    assert precious.read_text() == "years of work"


def test_a_full_disk_is_one_sentence_and_makes_nothing(world: World) -> None:
    world.python(world.path / "python3")
    world.program(world.path / "df", "#!/bin/sh\necho header\necho /dev/sda1 100 99 2097152 99% /\n")
    result = world.bash(PREPARE)
    assert result.returncode == 1
    assert f"needs 8 GiB of disk and {world.root} has 2 GiB free: make room" in result.stderr
    assert not world.venv.exists()


def test_a_failed_installation_shows_the_end_of_the_log_and_may_be_repeated(made: World) -> None:
    made.venv.joinpath("k3train.stamp").unlink()
    # pip is real; the index it is pointed at is an empty folder, and no setuptools is new enough.
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(made.home), "PIP_CONFIG_FILE": os.devnull}
    made.root.joinpath("constraints.txt").write_text("setuptools==9999\n")
    result = made.bash("prepare_environment", **offline)
    assert result.returncode == 1
    *shown, last = result.stderr.splitlines()
    assert any(line.startswith("  | ERROR: ") and "setuptools" in line for line in shown)
    assert last.startswith("k3train: pip could not install the pinned packages")
    assert last.endswith(f"log: {made.venv}/install.log")
    assert not made.venv.joinpath("k3train.stamp").exists()
    assert "packages installed" in made.bash(PREPARE).stdout

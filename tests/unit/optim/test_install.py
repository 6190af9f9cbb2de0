"""Which Adam megatron-core is given."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import megatron.core.optimizer as core
import pytest
from megatron.core.optimizer import distrib_optimizer

from k3train.optim import adam

HAVE_FUSED_ADAM = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(HAVE_FUSED_ADAM, reason="Transformer Engine brings its own FusedAdam")
def test_megatron_takes_its_fused_paths_with_ours() -> None:
    adam.install()
    adam.install()
    assert core.Adam is distrib_optimizer.Adam is adam.GroupStepAdam
    assert not core.USING_PYTORCH_OPTIMIZER
    assert distrib_optimizer.HAVE_APEX_OR_TE


def test_a_fused_adam_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedAdam: ...

    monkeypatch.setattr(core, "Adam", FusedAdam)
    monkeypatch.setattr(core, "USING_PYTORCH_OPTIMIZER", False)
    adam.install()
    assert core.Adam is FusedAdam


PROGRAM = """
import sys
if sys.argv[1:] == ["cpu"]:
    from k3train.backend.start import start_backend
    from k3train.config.schema import Device
    start_backend(Device.cpu)
import megatron.core.optimizer as core
from k3train.optim import adam
adam.install()
print(core.Adam.__module__)
"""
OURS = "k3train.optim.adam"


@pytest.mark.skipif(HAVE_FUSED_ADAM, reason="Transformer Engine comes first")
@pytest.mark.parametrize(
    ("is_nvidia_s", "arguments", "taken"),
    [(True, [], "apex.optimizers"), (False, [], OURS), (True, ["cpu"], OURS)],
)
def test_only_nvidia_s_apex_counts_and_only_on_a_gpu(
    tmp_path: Path, is_nvidia_s: bool, arguments: list[str], taken: str
) -> None:
    """The PyPI package apex has no ``apex.optimizers``."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    if is_nvidia_s:
        (tmp_path / "apex" / "optimizers.py").write_text("class FusedAdam: ...\nclass FusedSGD: ...\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == taken

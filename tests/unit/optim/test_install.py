"""Which Adam megatron-core is given."""

from __future__ import annotations

import importlib.util

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

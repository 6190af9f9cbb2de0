"""What would end every rank at its start is found by the command, which then leaves nothing behind."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3train.__main__ import main
from k3train.backend.start import wants_gpus
from k3train.checkpoint.manifest import Manifest, digest_file, write_manifest
from k3train.config.build import to_plain
from k3train.config.problems import ConfigError, Unavailable
from k3train.config.schema import (
    Checkpoint,
    Device,
    Model,
    Mtp,
    Precision,
    Quantile,
    RouterInput,
    RouterRule,
    Run,
)
from k3train.config.trained import TRAIN_STATE
from k3train.monitor.metrics_file import METRICS
from k3train.train.claim import LOCK, claimed
from k3train.train.preflight import check_run
from tests.train.runs import small_model


def save(folder: Path, model: Model) -> Path:
    """A checkpoint, as far as settings and files tell."""
    folder.mkdir(parents=True)
    state = folder / TRAIN_STATE
    state.write_text(json.dumps({"train": {"settings": {"model": to_plain(model)}}}))
    write_manifest(folder, Manifest(step=1, milestone=True, files={TRAIN_STATE: digest_file(state)}))
    return folder


def starting_from(path: Path, **changes: object) -> Run:
    model = replace(small_model(), **changes)
    run = Run(device=Device.cpu, model=model, checkpoint=Checkpoint(load_from=str(path)))
    run.dir = str(path.parent / "new")
    return run


def refusal(run: Run) -> str:
    with pytest.raises(ConfigError) as error:
        check_run(run)
    (problem,) = error.value.problems
    assert problem.key == "checkpoint.load_from"
    return str(problem)


def test_a_checkpoint_of_the_same_model_is_taken(tmp_path: Path) -> None:
    path = save(tmp_path / "saved", small_model())
    check_run(starting_from(path))
    check_run(starting_from(path, mtp=Mtp(loss_weight=0.3)))


def test_what_is_no_checkpoint_is_named_with_its_key(tmp_path: Path) -> None:
    assert "cannot be loaded: " in refusal(starting_from(tmp_path / "nope"))
    (tmp_path / "empty").mkdir()
    assert "this is no checkpoint, or one that was never completed" in refusal(
        starting_from(tmp_path / "empty")
    )
    cut = save(tmp_path / "cut", small_model())
    (cut / TRAIN_STATE).write_text("{}")
    assert "has 2 bytes" in refusal(starting_from(cut))


def test_a_run_s_folder_is_answered_with_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (4, 12):
        save(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", small_model())
    for given in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert (
            f"{given} holds checkpoints and is none itself: give one of them, such as "
            f"{tmp_path}/run/checkpoints/step_00000012"
        ) in refusal(starting_from(given))


def test_another_model_is_named_by_the_settings_that_differ(tmp_path: Path) -> None:
    path = save(tmp_path / "saved", small_model())
    said = refusal(starting_from(path, hidden_size=64, num_heads=4))
    assert "model.hidden_size is 32 there and 64 here, model.num_heads is 2 there and 4 here" in said


def test_another_routing_rule_is_taken_and_another_input_of_the_router_is_named(tmp_path: Path) -> None:
    model = small_model()
    path = save(tmp_path / "saved", model)
    other = replace(model.moe.router, rule=RouterRule.sign, quantile=Quantile(bins=64, window=4))
    check_run(starting_from(path, moe=replace(model.moe, router=other)))
    latent = replace(other, input=RouterInput.latent)
    said = refusal(starting_from(path, moe=replace(model.moe, router=latent)))
    assert "holds another model: model.moe.router.input is hidden there and latent here. Use" in said


def test_another_precision_is_answered_with_both_ways_out(tmp_path: Path) -> None:
    path = save(tmp_path / "saved", replace(small_model(), precision=Precision.bf16))
    said = refusal(starting_from(path, precision=Precision.fp32))
    assert "holds its matrices in bf16, and model.precision is fp32. Set model.precision=bf16" in said
    assert "--precision fp32" in said


def test_a_run_that_has_trained_no_longer_asks_for_what_it_began_with(tmp_path: Path) -> None:
    run = starting_from(tmp_path / "gone")
    save(Path(run.dir) / "checkpoints" / "step_00000001", small_model())
    check_run(run)


def test_gpus_are_counted_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert wants_gpus(Device.auto, 2)
    assert not wants_gpus(Device.cpu, 9)
    with pytest.raises(Unavailable, match=r"has 2 GPUs.*cluster\.ranks_per_node=2"):
        wants_gpus(Device.auto, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not wants_gpus(Device.auto, 3)


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("device=cuda", 3, "device=cuda, but torch sees no GPU"),
        ("checkpoint.load_from=nowhere", 2, "checkpoint.load_from = nowhere cannot be loaded"),
    ],
)
def test_a_refused_start_leaves_no_folder(
    setting: str,
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", f"dir={tmp_path}/run", setting]) == code
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder_of_another() -> Iterator[Path]:
    """A run's folder in which this process may not make files, but may write the lock that is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / LOCK).touch(0o666)
        (folder / LOCK).chmod(0o666)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:  # root may write everywhere
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_a_folder_that_may_only_be_read_is_named_by_its_setting(folder_of_another: Path) -> None:
    refused = pytest.raises(Unavailable, match=rf"dir = {folder_of_another} cannot hold the run: Permission")
    with refused, claimed(Run(dir=str(folder_of_another))):
        pass


@pytest.mark.parametrize("name", [METRICS, "history.jsonl"])
def test_a_file_that_cannot_be_appended_to_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    refused = pytest.raises(Unavailable, match=rf"cannot hold the run: Is a directory \(.*{name}\)")
    with refused, claimed(Run(dir=str(tmp_path))):
        pass

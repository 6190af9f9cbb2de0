"""Text from a trained model: what decides it, and what is refused."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch

from k3train.__main__ import main as k3train
from k3train.checkpoint.listing import committed
from k3train.checkpoint.manifest import digest_file, read_manifest, write_manifest
from k3train.checkpoint.stage import rng_file
from k3train.config.compose import save_resolved
from k3train.config.schema import Curriculum, Run, Stage
from tests.train.commands import command
from tests.train.runs import give_tokenizer, make_run, train_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step of a run, so that many tokens are likely."""
    stages = {"only": Stage(context_tokens=64, tokens=128, batch_tokens=128)}
    run = make_run(
        tmp_path_factory.mktemp("trained"),
        curriculum=Curriculum(stages=stages, order=["only"], eval_tokens=64),
    )
    give_tokenizer(run)
    assert train_run(run) == [0]
    save_resolved(run, Path(run.dir) / "run.yaml")
    return run


def text(run: Run, log: Path, *options: str) -> str:
    arguments = ["sample", run.dir, "--prompt", "w5 w6", "--tokens", "12", *options]
    code, printed = command(k3train, arguments, log)
    assert code == 0, printed
    return printed


def with_other_generators(checkpoint: Path, copy: Path) -> Path:
    """The same weights, saved when the training run's generators stood elsewhere."""
    shutil.copytree(checkpoint, copy)
    file = copy / rng_file(0)
    state = json.loads(file.read_text())
    there = torch.Generator().manual_seed(99).get_state()
    state["torch"] = base64.b64encode(there.numpy().tobytes()).decode()
    file.write_text(json.dumps(state))
    manifest = read_manifest(copy)
    manifest.files[file.name] = digest_file(file)
    write_manifest(copy, manifest)
    return copy


def test_the_seed_decides_the_text_and_where_the_training_run_stood_does_not(
    trained: Run, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    texts = [text(trained, log, "--seed", str(seed)) for seed in range(3)]
    assert len(set(texts)) == 3
    assert text(trained, log, "--seed", "2") == texts[2]
    ((_, path),) = committed(Path(trained.dir) / "checkpoints")
    other = with_other_generators(path, tmp_path / "step_00000001")
    assert text(trained, log, "--seed", "2", "--checkpoint", str(other)) == texts[2]
    greedy = [text(trained, log, "--temperature", "0", "--seed", seed) for seed in "01"]
    assert greedy[0] == greedy[1]


def test_a_checkpoint_that_does_not_exist_is_answered_with_where_they_are(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no = tmp_path / "no"
    assert k3train(["sample", trained.dir, "--prompt", "w5", "--checkpoint", str(no)]) == 2
    assert capsys.readouterr().err == (
        f"--checkpoint {no} does not exist: give one of those in {trained.dir}/checkpoints, or none\n"
    )

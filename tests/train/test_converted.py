"""A trained model goes out in the released layout, comes back, and trains on as if it had never left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from k3train.__main__ import main
from k3train.config.schema import Checkpoint, Curriculum, Precision, Run, Source, Stage
from tests.train.runs import losses, make_corpus, make_run, small_model, train_run

FIRST = Stage(context_tokens=128, tokens=6 * 512, batch_tokens=512, mix={"counting": 1.0})
SECOND = replace(FIRST, tokens=512, mix={"other": 1.0})
"""Of text that the first stage does not draw from: a new run begins with the same batch."""


def run_of(folder: Path, name: str, **stages: Stage) -> Run:
    run = make_run(folder, curriculum=Curriculum(stages=stages, order=list(stages), eval_tokens=256))
    run.dir = str(folder / name)
    run.model = replace(small_model(), precision=Precision.bf16)
    run.data.sources["other"] = Source(path=str(folder / "corpus" / "other"), max_epochs=10)
    return run


def test_first_loss_from_a_converted_checkpoint_is_the_next_step_s(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus" / "other", documents=100, seed=3)
    make_corpus(tmp_path / "corpus" / "train", documents=300, seed=1)
    make_corpus(tmp_path / "corpus" / "heldout", documents=40, seed=2)
    trained = run_of(tmp_path, "trained", first=FIRST, second=SECOND)
    assert train_run(trained) == [0]
    original = tmp_path / "trained" / "checkpoints" / "step_00000006"
    released, back = tmp_path / "released", tmp_path / "back"
    assert main(["convert", "export", str(original), str(released)]) == 0
    assert main(["convert", "import", str(released), str(back)]) == 0
    new = run_of(tmp_path, "new", second=SECOND)
    new.checkpoint = Checkpoint(load_from=str(back))
    assert train_run(new) == [0]
    assert losses(new)[1] == losses(trained)[7]
    assert losses(new)[1] < losses(trained)[1] - 0.3

"""What a later start of a run may change, what it may not, and how it may all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.listing import last_trained
from k3train.config.build import to_plain
from k3train.config.compare import compare, describe, differences, settle, tokens_of
from k3train.config.compose import load_resolved, to_yaml
from k3train.config.history import run_id
from k3train.config.identity import KINDS, Kind, covers, kind_of
from k3train.config.keys import flattened, follow
from k3train.config.problems import BadInput, ConfigError
from k3train.config.rules import check
from k3train.config.trained import TRAIN_STATE, Trained
from tests.config.trees import four_stage_run
from tests.full_disk import files_end_at
from tests.history import read_history
from tests.saved import save_checkpoint, seal

STAGE = "curriculum.stages.s2048"
MIXES = {f"curriculum.stages.{name}.mix": {"code": 1.0} for name in ("s256", "s2048", "s8192", "s32768")}


def after(steps: int) -> int:
    """Tokens of the run's first steps."""
    return tokens_of(Trained(steps=steps), four_stage_run())


@pytest.mark.parametrize(
    ("changes", "steps", "is_refused"),
    [
        ({"seed": 9}, 0, False),
        ({"seed": 9}, 1, True),
        ({"model.hidden_size": 256}, 1, True),
        ({"model.moe.router.quantile.bins": 10}, 1, True),
        ({"model.mtp.num_layers": 1}, 50, True),
        ({"data.pack_window_tokens": 1}, 1, True),
        ({"data.sources.code.path": "elsewhere"}, 50, False),
        ({"data.sources.code.min_document_tokens": 9}, 0, False),
        ({"data.sources.code.min_document_tokens": 9}, 1, True),
        ({"data.sources.code.max_epochs": 2.0}, 50, False),
        ({"data.sources.code.max_epochs": 1.5}, 50, False),
        ({"data.sources.code.max_epochs": 0.5}, 50, True),
        ({"data.tokenizer": "elsewhere"}, 50, False),
        ({"data.heldout": {}}, 50, False),
        ({"data.prefetch_steps": 0}, 50, False),
        ({"optim.learning_rate": 0.1}, 50, False),
        ({"cluster.ranks_per_node": 4}, 50, False),
        ({"checkpoint.keep": 5}, 50, False),
        ({"checkpoint.load_from": "elsewhere"}, 0, False),
        ({"checkpoint.load_from": "elsewhere"}, 1, True),
        ({"curriculum.stages.s256.mix": {"code": 1.0}}, 1, True),
        ({"curriculum.stages.s256.parallel.ep": 2}, 1, False),
        ({"curriculum.stages.s256.micro_batch_sequences": 1}, 1, False),
        ({"curriculum.stages.s256.learning_rate.peak": 0.001}, 1, False),
        ({"curriculum.stages.s256.tokens": 40_960}, 0, False),
        ({"curriculum.stages.s256.tokens": 40_960}, 10, False),
        ({"curriculum.stages.s256.tokens": 40_960}, 11, True),
        ({"curriculum.stages.s256.tokens": 204_800}, 40, False),
        ({"curriculum.stages.s256.tokens": 204_800}, 41, True),
        ({f"{STAGE}.batch_tokens": 16_384}, 40, False),
        ({f"{STAGE}.batch_tokens": 16_384}, 41, True),
        ({f"{STAGE}.context_tokens": 1_024}, 41, True),
        ({f"{STAGE}.mtp_loss_weight": 0.3}, 40, False),
        ({f"{STAGE}.mtp_loss_weight": 0.3}, 41, True),
        ({"curriculum.order": ["s2048", "s256", "s8192", "s32768"]}, 0, False),
        ({"curriculum.order": ["s2048", "s256", "s8192", "s32768"]}, 1, True),
        ({"curriculum.order": ["s256", "s8192", "s2048", "s32768"]}, 40, False),
        ({"curriculum.order": ["s256", "s2048"]}, 1, False),
    ],
)
def test_what_may_change(changes: dict[str, Any], steps: int, is_refused: bool) -> None:
    found = compare(four_stage_run(), four_stage_run(changes), trained_tokens=after(steps))
    assert (len(found.refused) > 0, len(found.accepted) > 0) == (is_refused, not is_refused)


def test_a_source_may_come_and_go_as_long_as_no_stage_that_has_begun_draws_from_it() -> None:
    """Without a mix a stage draws from every source there is."""
    named, unnamed = four_stage_run(MIXES), four_stage_run()
    for base, changes, refused in (
        (named, MIXES | {"data.sources.new": {"path": "corpus/new"}}, False),
        (unnamed, {"data.sources.new": {"path": "corpus/new"}}, True),
        (named, MIXES | {"data.sources.docs": ...}, False),
        (named, MIXES | {"data.sources.code": ...}, True),
        (unnamed, {"data.sources.docs": ...}, True),
    ):
        assert bool(compare(base, four_stage_run(changes), trained_tokens=after(1)).refused) is refused, (
            changes
        )
        assert compare(base, four_stage_run(changes)).refused == [], changes


def test_every_setting_says_whether_it_may_change() -> None:
    assert [key for key in flattened() if kind_of(key) is None] == []
    assert [pattern for pattern in KINDS if not any(covers(pattern, key) for key in flattened())] == []
    assert kind_of("model.moe.top_k") is Kind.identity
    assert kind_of("optim.optimizer") is kind_of("optim.muon.adamw") is Kind.identity
    assert kind_of("curriculum.stages.any.mix.code") is Kind.stage
    assert kind_of("not.a.setting") is None


def test_no_setting_changes_in_silence() -> None:
    """Change each setting of a run in its second stage: the change is refused or said, never passed over."""
    old = four_stage_run(MIXES)
    seen = set()
    for key, change in _every_change(old, ""):
        new = four_stage_run(MIXES)
        change(new)
        found = compare(old, new, trained_tokens=after(45))
        keys = [each.key for each in (*found.refused, *found.accepted)]
        assert keys == [key], key
        assert bool(found.refused) is not any(f": {line}" for line in describe(found)), key
        assert len(list(describe(found))) == len(found.accepted), key
        seen.add(key)
    assert len(seen) > 100


def _every_change(node: Any, path: str) -> list[tuple[str, Callable[[Any], None]]]:
    """(key, function that gives a run another value there) for each setting below ``node``."""
    found: list[tuple[str, Callable[[Any], None]]] = []
    names = [field.name for field in fields(node)] if is_dataclass(node) else list(node)
    for name in names:
        value = getattr(node, name) if is_dataclass(node) else node[name]
        key = f"{path}.{name}" if path else name
        if is_dataclass(value) or isinstance(value, dict):
            found += _every_change(value, key)
        else:
            found.append((key, lambda run, key=key, value=value: _set(run, key, _other(key, value))))
    return found


def _set(run: Any, key: str, value: object) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        run = run[parent] if isinstance(run, dict) else getattr(run, parent)
    if isinstance(run, dict):
        run[last] = value
    else:
        setattr(run, last, value)


def _other(key: str, value: object) -> object:
    match value:
        case bool():
            return not value
        case Enum():
            others = [each for each in type(value) if each is not value]
            return others[0] if others else None
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list():
            return [*value, 1]
        case _:
            return {"list": [1]}.get(str(follow(key))[:4], "x")


def test_difference_of_a_whole_stage() -> None:
    old = four_stage_run()
    new = four_stage_run({"curriculum.stages.s256": ...})
    assert {difference.key.rpartition(".")[0] for difference in differences(old, new)} >= {
        "curriculum.stages.s256",
        "curriculum.stages.s256.learning_rate",
    }
    assert all(difference.new is None for difference in differences(old, new))


def test_going_on_with_a_changed_run_is_said_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert list(describe(settle(four_stage_run(), path, Trained()))) == []
    assert list(describe(settle(four_stage_run(), path, Trained()))) == []
    changed = settle(four_stage_run({"optim.beta2": 0.99}), path, Trained(steps=3))
    assert list(describe(changed)) == ["changed since the last start: optim.beta2: 0.95 -> 0.99"]
    assert load_resolved(path).optim.beta2 == 0.99
    (entry,) = read_history(tmp_path)
    assert (entry["step"], entry["changed"]) == (3, {"optim.beta2": [0.95, 0.99]})


def test_going_on_with_another_run_is_refused_with_both_values(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    settle(four_stage_run(), path, Trained())
    with pytest.raises(ConfigError) as error:
        settle(four_stage_run({"seed": 9, "model.num_heads": 8, "optim.beta2": 0.99}), path, Trained(steps=1))
    assert [(p.key, p.id) for p in error.value.problems] == [
        ("seed", "run.identity"),
        ("model.num_heads", "run.identity"),
    ]
    assert str(error.value.problems[0]) == (
        f"seed = 9 was 1234 when {tmp_path} was trained, and decides what is trained. Keep the old value, "
        "start another run with another name, or accept the change with "
        "resume.override=[seed]. [run.identity]"
    )
    assert load_resolved(path) == four_stage_run(), "nothing was written"
    assert read_history(tmp_path) == []


def checkpoint(folder: Path, step: int, settings: object) -> Path:
    """What a start reads of a checkpoint."""
    return save_checkpoint(folder, step, {"settings": settings})


def test_the_checkpoint_says_what_was_trained_and_nothing_is_written_before_it_is_asked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.yaml"
    saved = checkpoint(tmp_path, 3, to_plain(four_stage_run()))
    with pytest.raises(ConfigError, match=f"seed = 9 was 1234 when {saved} was trained"):
        settle(four_stage_run({"seed": 9}), path, last_trained(tmp_path))
    assert not path.exists()
    settle(four_stage_run(), path, last_trained(tmp_path))
    path.write_text(to_yaml(four_stage_run({"seed": 9})))  # of a start that trained nothing
    found = settle(four_stage_run(), path, last_trained(tmp_path))
    assert list(describe(found)) == ["changed since the last start: seed: 9 -> 1234"]
    assert load_resolved(path) == four_stage_run()


def test_until_something_is_trained_every_setting_is_free(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    settle(four_stage_run(), path, last_trained(tmp_path))
    settle(four_stage_run({"seed": 9}), path, last_trained(tmp_path))
    assert load_resolved(path).seed == 9


def test_a_checkpoint_without_readable_settings_tells_its_step_only(tmp_path: Path) -> None:
    assert last_trained(tmp_path) == Trained()
    older = checkpoint(tmp_path, 3, to_plain(four_stage_run({"seed": 9})))
    for step, settings in ((5, {"sed": 1}), (6, None)):
        checkpoint(tmp_path, step, settings)
    unreadable = checkpoint(tmp_path, 7, None)
    (unreadable / TRAIN_STATE).write_bytes(b"\xff")
    seal(unreadable, 7)
    found = last_trained(tmp_path)
    assert (found.steps, found.checkpoint) == (7, older)
    assert found.settings is not None
    assert found.settings.seed == 9


def test_a_checkpoint_under_another_step_s_name_is_refused(tmp_path: Path) -> None:
    path = seal(checkpoint(tmp_path, 99, None), 6)
    with pytest.raises(BadInput, match=f"{path} holds step 6, not 99 as its name says"):
        last_trained(tmp_path)
    path.rename(path.with_name("step_00000006"))
    assert last_trained(tmp_path).steps == 6


def cut(checkpoint: Path) -> None:
    file = checkpoint / TRAIN_STATE
    file.write_bytes(file.read_bytes()[:-1])


def test_the_newest_complete_checkpoint_counts_and_stray_names_do_not(tmp_path: Path) -> None:
    settings = to_plain(four_stage_run())
    for step in (9, 10):
        save_checkpoint(tmp_path, step, {"settings": settings, "tokens": 1024 * step})
    folder = tmp_path / "checkpoints"
    (folder / "step_00000098").mkdir()
    (folder / "step_00000099").write_text("x")
    found = last_trained(tmp_path)
    assert (found.steps, found.tokens, found.checkpoint) == (10, 10240, folder / "step_00000010")
    cut(folder / "step_00000010")
    found = last_trained(tmp_path)
    assert (found.steps, found.tokens, found.checkpoint) == (9, 9216, folder / "step_00000009")
    cut(folder / "step_00000009")
    with pytest.raises(BadInput, match=r"none of the 4 checkpoints can be used; the newest: .*step_00000099"):
        last_trained(tmp_path)


def test_a_change_to_a_run_that_has_ended_is_said_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    settle(four_stage_run(), path, Trained())
    ended = Trained(steps=54)
    assert list(describe(settle(four_stage_run(), path, ended))) == []
    other = four_stage_run({"optim.weight_decay": 0.02})
    first, last = describe(settle(other, path, ended))
    assert first == "not changed, since nothing is left to train: optim.weight_decay: 0.1 -> 0.02"
    assert last.startswith("all 54 steps are trained, and run.yaml stays as it is")
    assert load_resolved(path) == four_stage_run()
    assert read_history(tmp_path) == []
    longer = four_stage_run({"curriculum.stages.s32768.tokens": 98_304})
    assert settle(longer, path, ended).all_trained == 0
    assert load_resolved(path) == longer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data.sources.new": {"path": "corpus/new"}},
            "data.sources.new = corpus/new was not there when {trained} was trained, and the stage s256, "
            "which has begun, draws from all sources. Take it out, start another run with another name whose "
            "stages name their sources in a mix, or accept the change with "
            "resume.override=[data.sources.new]. ",
        ),
        (
            {"data.sources.docs": ...},
            "data.sources.docs = null was there when {trained} was trained, and text of docs has been drawn. "
            "Put it back, start another run with another name, or accept the change with "
            "resume.override=[data.sources.docs]. ",
        ),
    ],
)
def test_a_source_that_is_new_or_gone_is_one_problem_that_one_key_accepts(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = tmp_path / "run.yaml"
    settle(four_stage_run(), path, Trained())
    with pytest.raises(ConfigError) as error:
        settle(four_stage_run(changes), path, Trained(steps=1))
    (problem,) = error.value.problems
    assert str(problem) == said.format(trained=tmp_path) + "[run.identity]"
    accepted = four_stage_run(changes | {"resume.override": [problem.key]})
    assert check(accepted) == []
    assert settle(accepted, path, Trained(steps=1)).refused == []


@pytest.mark.parametrize("full", ["run.yaml", "history.jsonl"])
def test_on_a_full_disk_a_change_leaves_no_trace_and_the_file_is_named(tmp_path: Path, full: str) -> None:
    path, history = tmp_path / "run.yaml", tmp_path / "history.jsonl"
    settle(four_stage_run(), path, Trained())
    room = path.stat().st_size + 1000
    history.write_text("{}\n" + " " * (room - 10) + "\n" if full == "history.jsonl" else "{}\n")
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with files_end_at(room if full == "history.jsonl" else 1000), pytest.raises(OSError, match=full) as error:
        settle(four_stage_run({"seed": 9}), path, Trained())
    assert error.value.filename == str(tmp_path / full)
    assert error.value.strerror == "File too large"
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_first_start_on_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    with files_end_at(1000), pytest.raises(OSError, match=r"run\.yaml"):
        settle(four_stage_run(), tmp_path / "run.yaml", Trained())
    assert list(tmp_path.iterdir()) == []


def test_an_override_is_accepted_and_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    settle(four_stage_run(), path, Trained())
    other = {"seed": 9, "data.pack_window_tokens": 8192, "resume.override": ["seed"]}
    with pytest.raises(ConfigError) as error:
        settle(four_stage_run(other), path, Trained(steps=45))
    assert [problem.key for problem in error.value.problems] == ["data.pack_window_tokens"]
    changed = settle(four_stage_run(other | {"resume.override": ["seed", "data"]}), path, Trained(steps=45))
    assert "changed since the last start, because resume.override says so: seed: 1234 -> 9" in list(
        describe(changed)
    )
    (entry,) = read_history(tmp_path)
    assert entry["overridden"] == {"seed": [1234, 9], "data.pack_window_tokens": [4_194_304, 8192]}


def test_an_override_must_name_a_setting() -> None:
    (problem,) = check(four_stage_run({"resume.override": ["sed", "model.moe"]}))
    assert str(problem) == "resume.override = sed names no setting. Did you mean seed? [resume.override]"


def test_the_run_s_id_is_made_once(tmp_path: Path) -> None:
    first = run_id(tmp_path / "run")
    assert run_id(tmp_path / "run") == first
    assert len(first) == 12
    assert run_id(tmp_path / "other") != first


@pytest.mark.parametrize("content", [b"", b"../other\n", b"\xff\xfe", b"two words", b"x" * 65])
def test_what_is_no_id_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run_id").write_bytes(content)
    with pytest.raises(BadInput, match=r"run_id holds no run's id"):
        run_id(tmp_path)

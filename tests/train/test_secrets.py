"""A password in the environment, in settings or in messages is in nothing that a run prints or writes."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.__main__ import main as k3train
from k3train.config.compose import save_resolved
from k3train.config.problems import ConfigError
from k3train.config.rules import check
from k3train.config.schema import Checkpoint, Run
from k3train.config.secrets import HIDDEN, redact, redact_data, redacted_output
from k3train.monitor.monitor import Monitor, open_monitor
from k3train.train.__main__ import main as rank_program
from tests.train.commands import command
from tests.train.runs import make_run
from tests.unit.monitor.test_console import STEP

ROOT = Path(__file__).parents[2]
SECRET = "correct-horse/battery+staple"


@pytest.fixture(autouse=True)
def _in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-ish")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"401 for {SECRET}.", f"401 for {HIDDEN}."),
        (
            "monitor.wandb_api_key = abc is not a setting",
            f"monitor.wandb_api_key = {HIDDEN} is not a setting",
        ),
        ('{"hf_token": "a b", "tokens": 5}', f'{{"hf_token": {HIDDEN}, "tokens": 5}}'),
        ("AWS_SECRET_ACCESS_KEY=ab/c+d", f"AWS_SECRET_ACCESS_KEY={HIDDEN}"),
        ("password: hunter2, then", f"password: {HIDDEN}, then"),
        ("s3://me:pw@host/corpus", f"s3://me:{HIDDEN}@host/corpus"),
        ("batch_tokens = 4096, tokenizer=a/b", "batch_tokens = 4096, tokenizer=a/b"),
        ("as model.KEY=VALUE, or KEY=VALUE.", "as model.KEY=VALUE, or KEY=VALUE."),
        ("model.KEY=value API_KEY=VALUE9 ", f"model.KEY={HIDDEN} API_KEY={HIDDEN} "),
        ("Write 'key: value' lines", "Write 'key: value' lines"),
        ("false-ish https://host:80/a", "false-ish https://host:80/a"),
    ],
)
def test_secrets_are_hidden_and_other_words_are_not(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_data_is_searched_to_its_leaves() -> None:
    data = {"a": [SECRET, {"my_token": "x", "tokens": 3}], "key": "model"}
    assert redact_data(data) == {"a": [HIDDEN, {"my_token": HIDDEN, "tokens": 3}], "key": "model"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("wandb_project", SECRET), ("wandb_project", f"x{SECRET}"), ("wandb_project", "s3://me:pw@host")],
)
def test_a_setting_that_holds_one_is_refused_without_repeating_it(key: str, value: str) -> None:
    run = Run()
    setattr(run.monitor, key, value)
    (problem,) = (each for each in check(run) if each.id == "config.secret")
    assert problem.key == f"monitor.{key}"
    assert value not in str(problem)


def try_everything(arguments: list[str]) -> int:
    """A run that succeeds but for the messages: settings with the secret, warnings, an event, a traceback."""
    for override in (
        f"monitor.wandb_project={SECRET}",
        f"monitor.wandb_api_key={SECRET}",
        f"+password={SECRET}",
    ):
        assert k3train(["train", override, f"dir={arguments[0]}"]) == 2
    code = rank_program(arguments[1:])
    with redacted_output():
        logging.getLogger("any").warning("login failed with %s", SECRET)
        print("environment:", {"WANDB_API_KEY": SECRET}, file=sys.stderr)
    return code


def test_nothing_that_a_run_prints_or_writes_holds_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, checkpoint=Checkpoint(every_steps=4, asynchronous=True))
    stages = {"short": run.curriculum.stages["short"]}
    run = replace(run, curriculum=replace(run.curriculum, stages=stages, order=["short"]))
    save_resolved(run, Path(run.dir) / "run.yaml")
    finished = Monitor.event

    def told(self: Monitor, event: str, *, step: int, tokens: int, **detail: object) -> None:
        finished(
            self, event, step=step, tokens=tokens, **detail, cause=f"said {SECRET}", auth_token="hunter2"
        )

    monkeypatch.setattr(Monitor, "event", told)
    arguments = [f"{tmp_path}/never", str(Path(run.dir) / "run.yaml")]
    code, printed = command(try_everything, arguments, tmp_path / "log")
    assert code == 0, printed
    assert printed.count(HIDDEN) > 6
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"run.yaml", "metrics.jsonl", "train_state.json", "MANIFEST.json", "log", "lock"} <= names
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert b"hunter2" not in content, path


def record_everything(arguments: list[str]) -> int:
    """What a rank's program does with a sink: messages with the secret, an event, a step, the end."""
    folder, extra = arguments
    run = Run(dir=folder)
    setattr(run.monitor, extra, True)
    with redacted_output():
        monitor = open_monitor(run, writes=True)
        print(f"logged in with {SECRET}")
        logging.getLogger("any").warning("login failed with %s", SECRET)
        monitor.event("failed", step=120, tokens=0, cause=f"said {SECRET}", auth_token="hunter2")
        monitor.write(STEP)
        monitor.close()
    return 0


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_other_sinks_do_not_hold_it_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    pytest.importorskip(extra)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    # W&B follows the output of a process that was started, not that of one that was forked.
    program = f"from {__name__} import record_everything as main; import sys; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, str(tmp_path / "run"), extra]
    ended = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(HIDDEN) >= 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    told = b"".join(path.read_bytes() for path in files if path.suffix == ".wandb" or "tfevents" in path.name)
    assert b"train/loss" in told, "the sink has recorded the step"
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert b"hunter2" not in content, path


def test_a_message_of_the_settings_does_not_repeat_it() -> None:
    run = Run()
    run.monitor.wandb_project = SECRET
    with pytest.raises(ConfigError) as error:
        raise ConfigError(check(run))
    assert SECRET not in str(error.value)

"""Checkpoints and settings made to run code, given to the real commands: none runs, each is refused."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from k3train.__main__ import main as k3train
from k3train.checkpoint.listing import committed
from k3train.checkpoint.manifest import digest_file, read_manifest, write_manifest
from k3train.config.compose import save_resolved, to_yaml
from k3train.config.schema import Checkpoint, Run
from k3train.train.__main__ import main as rank_program
from tests.train.commands import command
from tests.train.runs import give_tokenizer, make_run, train_run

ROOT = Path(__file__).parents[2]


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple:
        return (open, (self.proof, "w"))


def archive(proof: Path) -> bytes:
    content = io.BytesIO()
    torch.save({"a": Payload(proof)}, content)
    return content.getvalue()


def array(proof: Path) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([Payload(proof)], dtype=object), allow_pickle=True)
    return content.getvalue()


def into_index(path: Path, proof: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Payload(proof)))


def beside_the_index(path: Path, proof: Path) -> None:
    """A program in an attribute of an index that is otherwise sound."""
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = Payload(proof)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def into_entry(path: Path, key: str, content: bytes) -> None:
    """Let the index' entry of a tensor or byte object point at ``content``."""
    (path / "__9_0.distcp").write_bytes(content)
    index = pickle.loads((path / ".metadata").read_bytes())
    for name, info in index.storage_data.items():
        if key in name.fqn:
            index.storage_data[name] = replace(
                info, relative_path="__9_0.distcp", offset=0, length=len(content)
            )
    (path / ".metadata").write_bytes(pickle.dumps(index))


CHECKPOINTS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "index": (into_index, "asks for"),
    "planner data": (beside_the_index, "asks for"),
    "common state": (lambda path, proof: into_entry(path, "common_state", archive(proof)), "not plain data"),
    "tensor": (lambda path, proof: into_entry(path, "embedding.weight", archive(proof)), "as plain tensors"),
    "array": (lambda path, proof: into_entry(path, "embedding.weight", array(proof)), "as plain tensors"),
    "common.pt": (lambda path, proof: (path / "common.pt").write_bytes(archive(proof)), "common.pt"),
    "state": (
        lambda path, proof: (path / "train_state.json").write_bytes(pickle.dumps(Payload(proof))),
        "train_state.json cannot be read",
    ),
    "nested state": (
        lambda path, proof: (path / "train_state.json").write_text("[" * 100_000),
        "train_state.json cannot be read as JSON: it is nested too deeply; use an older checkpoint",
    ),
    "nested generators": (
        lambda path, proof: (path / "rng_00000.json").write_text("[" * 100_000),
        "rng_00000.json cannot be read as JSON: it is nested too deeply; use an older checkpoint",
    ),
    "generators": (
        lambda path, proof: (path / "rng_00000.json").write_bytes(pickle.dumps(Payload(proof))),
        "rng_00000.json",
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with one checkpoint, a tokenizer and steps left."""
    run = make_run(tmp_path_factory.mktemp("trained"))
    give_tokenizer(run)
    run.curriculum.eval_one_ahead = False
    assert train_run(run) == [0]
    newest, *others = (path for _, path in committed(Path(run.dir) / "checkpoints"))
    for path in (newest, *others[1:]):
        shutil.rmtree(path)
    save_resolved(run, Path(run.dir) / "run.yaml")
    return run


def seal(path: Path) -> None:
    """What an attacker does too: make the manifest match the files."""
    manifest = read_manifest(path)
    known = {each.name: digest_file(each) for each in path.iterdir() if each.name in manifest.files}
    new = {each.name: digest_file(each) for each in path.glob("__9_0.distcp")}
    write_manifest(path, replace(manifest, files={**known, **new}))


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused_by_every_command_that_reads_one(
    trained: Run, tmp_path: Path, kind: str
) -> None:
    plant, words = CHECKPOINTS[kind]
    run = replace(trained, dir=str(tmp_path / "run"))
    shutil.copytree(trained.dir, run.dir)
    (tmp_path / "run" / "run.yaml").write_text(to_yaml(run))
    ((_, path),) = committed(tmp_path / "run" / "checkpoints")
    proof = tmp_path / "proof"
    plant(path, proof)
    seal(path)
    fresh = replace(run, dir=str(tmp_path / "fresh"), checkpoint=Checkpoint(load_from=str(path)))
    save_resolved(fresh, tmp_path / "fresh.yaml")
    commands = {"resume": (rank_program, [str(tmp_path / "run" / "run.yaml")])}
    if kind in ("index", "tensor", "common.pt"):  # the reader is the same for all
        commands["load_from"] = (rank_program, [str(tmp_path / "fresh.yaml")])
        commands["sample"] = (k3train, ["sample", run.dir, "--prompt", "w5 w6", "--tokens", "1"])
    for name, (main, arguments) in commands.items():
        code, printed = command(main, arguments, tmp_path / "log", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
        assert (code, words in printed) == (2, True), (name, printed)
        assert not proof.exists(), name


def test_the_same_commands_take_the_checkpoint_as_it_was(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.dir, tmp_path / "run")
    arguments = ["sample", str(tmp_path / "run"), "--prompt", "w5 w6", "--tokens", "1"]
    code, printed = command(k3train, arguments, tmp_path / "log")
    assert code == 0, printed
    assert "w5 w6" in printed


TARGETS: list[dict] = [
    {"_target_": "os.system", "_args_": ["touch PROOF"]},
    {"_target_": "torch.load", "f": "PAYLOAD", "weights_only": False},
    {"_target_": "code.InteractiveInterpreter.runsource", "source": "open('PROOF', 'w')"},
    {"_target_": "code.InteractiveInterpreter"},
    {"_target_": "builtins.exec", "_args_": ["open('PROOF', 'w')"]},
    {"_target_": "subprocess.run", "args": ["touch", "PROOF"]},
    {"_target_": "pickle.load", "file": "PAYLOAD"},
]
TAGS = [
    "!!python/object/apply:os.system ['touch PROOF']",
    "!!python/object/new:subprocess.Popen [['touch', 'PROOF']]",
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "${oc.env:HOME}",
    "${oc.create:{_target_: os.system}}",
    "${hydra:runtime.cwd}",
]


def test_hostile_settings_are_refused_by_every_command_that_reads_them(trained: Run, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "payload").write_bytes(archive(proof))

    def filled(text: str) -> str:
        return text.replace("PROOF", str(proof)).replace("PAYLOAD", str(tmp_path / "payload"))

    configs = tmp_path / "configs"
    shutil.copytree(ROOT / "configs", configs)
    resolved = to_yaml(trained)
    codes = {}
    for number, payload in enumerate([*TARGETS, *TAGS]):
        text = filled(
            payload if isinstance(payload, str) else yaml.safe_dump(payload, default_flow_style=True)
        )
        (configs / "monitor" / "mine.yaml").write_text(f"extra: {text}\n")
        arguments = ["monitor=mine", "--config-dir", str(configs), f"dir={tmp_path}/never"]
        codes[number, "file"] = k3train(["train", *arguments])
        codes[number, "override"] = k3train(["train", f"optim.extra={text.strip()}", f"dir={tmp_path}/never"])
        (tmp_path / "run.yaml").write_text(f"{resolved}extra: {text}\n")
        codes[number, "rank"] = rank_program([str(tmp_path / "run.yaml")])
    assert set(codes.values()) == {2}, {key: code for key, code in codes.items() if code != 2}
    assert not proof.exists()
    assert not (tmp_path / "never").exists()

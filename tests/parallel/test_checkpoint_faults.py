"""Checkpoints that go wrong, on real ranks: kills, full disks, damage, hostile files, another model."""

from __future__ import annotations

import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3train.checkpoint.folder import clear_leftovers, newest_good, step_name, verify
from k3train.checkpoint.listing import committed
from k3train.checkpoint.load import load_checkpoint, read_train_state
from k3train.checkpoint.manifest import CheckpointError, digest_file, read_manifest, write_manifest
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.config.schema import Parallel, Precision
from tests.parallel.toy import assemble, build_toy, everything, train_toy
from tests.ranks import run_ranks

Toy = tuple[Any, Any, Any]


def state_at(step: int) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "stage": "one"}


def save(toy: Toy, folder: Path, step: int, *, milestone: bool = False, **extra: Any) -> Path:
    chunks, optimizer, groups = toy
    return save_checkpoint(
        Save(
            directory=folder,
            chunks=chunks,
            optimizer=optimizer,
            train_state={**state_at(step), **extra},
            groups=groups,
            keep=2,
            milestone=milestone,
        )
    )


def load(toy: Toy, path: Path) -> dict[str, Any]:
    chunks, optimizer, groups = toy
    return load_checkpoint(path, chunks=chunks, optimizer=optimizer, groups=groups)


def train(toy: Toy, step: int) -> None:
    chunks, optimizer, groups = toy
    train_toy(chunks, optimizer, groups, steps=1, start=step)


def tensors(toy: Toy) -> dict[str, torch.Tensor]:
    return assemble([everything(*toy)])


def save_two(rank: int, world: int, parallel: Parallel, folder: Path) -> None:
    toy = build_toy(world, parallel, Precision.bf16)
    for step in (1, 2):
        train(toy, step)
        save(toy, folder, step)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of step 1 and 2, written by two ranks."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, save_two, 2, Parallel(tp=2), folder)
    return folder


@pytest.fixture
def copied(two: Path, tmp_path: Path) -> Path:
    shutil.copytree(two, tmp_path / "run")
    return tmp_path / "run"


def test_every_file_is_listed_and_verified(two: Path) -> None:
    path = two / step_name(2)
    listed = set(read_manifest(path).files)
    assert listed | {"MANIFEST.json"} == {each.name for each in path.iterdir()}
    assert {"rng_00000.json", "rng_00001.json", "train_state.json", ".metadata", "metadata.json"} < listed
    assert any(name.startswith("__1_") for name in listed)
    assert (two / "LATEST").read_text() == step_name(2)
    assert read_train_state(path) == state_at(2)


def flip_middle_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def load_newest(rank: int, world: int, folder: Path) -> Any:
    toy = build_toy(world, Parallel(), Precision.bf16)
    path = newest_good(folder)
    assert path is not None
    return load(toy, path)["step"]


def test_any_damaged_file_of_a_real_checkpoint_is_noticed(copied: Path, two: Path) -> None:
    for name in read_manifest(two / step_name(2)).files:
        path = copied / step_name(2) / name
        flip_middle_bit(path)
        with pytest.raises(CheckpointError, match=name):
            verify(copied / step_name(2))
        assert newest_good(copied) == copied / step_name(1)
        shutil.copyfile(two / step_name(2) / name, path)
    verify(copied / step_name(2))


def test_all_ranks_fall_back_together(copied: Path) -> None:
    name = next(name for name in read_manifest(copied / step_name(2)).files if name.startswith("__1_"))
    flip_middle_bit(copied / step_name(2) / name)
    assert run_ranks(2, load_newest, 2, copied) == [1, 1]


def load_damaged(rank: int, path: Path) -> str:
    toy = build_toy(2, Parallel(), Precision.bf16)
    try:
        load(toy, path)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_loading_a_damaged_path_by_name_raises_on_every_rank(copied: Path) -> None:
    path = copied / step_name(2)
    flip_middle_bit(path / ".metadata")
    messages = run_ranks(2, load_damaged, path)
    assert all(".metadata is damaged" in message for message in messages)


class FileCalls:
    """Records this process' file operations below a folder and may kill the process before one of them."""

    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")

    def __init__(self, folder: Path, *, kill_at: int | None = None) -> None:
        self.folder, self.kill_at, self.active = str(folder), kill_at, False
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple) -> None:
        if not self.active or event not in self.EVENTS or not str(args[0]).startswith(self.folder):
            return
        if len(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(event)


def save_and_die(rank: int, world: int, folder: Path, dying_rank: int, kill_at: int | None) -> list[str]:
    """Continue from step 2 and save step 3, which also prunes step 1; returns the file operations."""
    toy = build_toy(world, Parallel(), Precision.bf16)
    load(toy, folder / step_name(2))
    train(toy, 3)
    calls = FileCalls(folder, kill_at=kill_at if rank == dying_rank else None)
    calls.active = True
    save(toy, folder, 3)
    calls.active = False
    return calls.seen


def check_after_kill(folder: Path) -> int:
    """A good checkpoint exists now, and clearing up leaves nothing but good ones; returns its step."""
    best = newest_good(folder)
    assert best is not None
    clear_leftovers(folder)
    assert newest_good(folder) == best
    for _, path in committed(folder):
        verify(path)
    assert {path.name for path in folder.iterdir()} == {path.name for _, path in committed(folder)} | {
        "LATEST"
    }
    return read_manifest(best).step


def kill_everywhere(
    two: Path, tmp_path: Path, world: int, dying_rank: int, only: str | None = None
) -> set[int]:
    """Kill a save before each of its file operations (of one kind); returns the newest good steps after."""
    shutil.copytree(two, tmp_path / "whole")
    seen = run_ranks(world, save_and_die, world, tmp_path / "whole", dying_rank, None)[dying_rank]
    places = [i for i, event in enumerate(seen) if only in (None, event)]
    assert len(places) > 3
    newest = set()
    for place in places:
        folder = tmp_path / "run"
        shutil.copytree(two, folder)
        with pytest.raises(AssertionError, match="ended with"):
            run_ranks(world, save_and_die, world, folder, dying_rank, place)
        newest.add(check_after_kill(folder))
        shutil.rmtree(folder)
    return newest


def test_a_kill_before_any_rename_leaves_a_good_checkpoint(two: Path, tmp_path: Path) -> None:
    assert kill_everywhere(two, tmp_path, 1, 0, "os.rename") == {2, 3}


def test_a_kill_of_another_rank_leaves_the_older_checkpoint(two: Path, tmp_path: Path) -> None:
    assert kill_everywhere(two, tmp_path, 2, 1) == {2}


@pytest.mark.slow
def test_a_kill_before_any_file_operation_leaves_a_good_checkpoint(two: Path, tmp_path: Path) -> None:
    assert kill_everywhere(two, tmp_path, 2, 0) == {2, 3}


def retry(rank: int, folder: Path) -> Any:
    toy = build_toy(2, Parallel(), Precision.bf16)
    load(toy, folder / step_name(2))
    train(toy, 3)
    save(toy, folder, 3)
    return read_train_state(folder / step_name(3))


def test_a_save_that_was_killed_is_made_again(copied: Path) -> None:
    with pytest.raises(AssertionError, match="ended with"):
        run_ranks(2, save_and_die, 2, copied, 0, 12)
    clear_leftovers(copied)
    assert run_ranks(2, retry, copied)[0] == state_at(3)
    assert newest_good(copied) == copied / step_name(3)


def save_on_full_disk(rank: int, folder: Path) -> Any:
    toy = build_toy(2, Parallel(), Precision.bf16)
    train(toy, 1)
    save(toy, folder, 1)
    train(toy, 2)
    before = tensors_of_rank(toy)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        save(toy, folder, 2)
    except CheckpointError as error:
        message = str(error)
    else:
        message = "saved"
    names = sorted(path.name for path in folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    untouched = all(torch.equal(a, b) for a, b in zip(before, tensors_of_rank(toy), strict=True))
    torch.distributed.barrier()
    save(toy, folder, 2)
    return message, names, untouched


def tensors_of_rank(toy: Toy) -> list[torch.Tensor]:
    return [value for *_, value in everything(*toy)]


def test_a_disk_that_is_full_on_one_rank_fails_the_save_everywhere_and_nothing_else(tmp_path: Path) -> None:
    for message, names, untouched in run_ranks(2, save_on_full_disk, tmp_path):
        assert "step_00000002 was not written" in message
        assert re.search(rf"File too large.*\d+ bytes, [\d.]+ GiB, are free in {tmp_path}", message), message
        assert "/__1_0.distcp" in message
        assert names == ["LATEST", step_name(1)]
        assert untouched
    assert newest_good(tmp_path) == tmp_path / step_name(2)


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple:
        return (open, (self.proof, "w"))


def seal(path: Path) -> None:
    """What an attacker does too: make the manifest match the files."""
    manifest = read_manifest(path)
    files = {each.name: digest_file(each) for each in path.iterdir() if each.name != "MANIFEST.json"}
    write_manifest(path, replace(manifest, files=files))


def load_message(rank: int, path: Path, precision: Precision) -> str:
    try:
        load(build_toy(1, Parallel(), precision), path)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_hostile_index_is_not_run(copied: Path, tmp_path: Path) -> None:
    path, proof = copied / step_name(2), tmp_path / "proof"
    (path / ".metadata").write_bytes(pickle.dumps(Payload(proof)))
    seal(path)
    (message,) = run_ranks(1, load_message, path, Precision.bf16)
    assert "asks for" in message
    assert not proof.exists()


def test_a_hostile_byte_object_is_not_run(copied: Path, tmp_path: Path) -> None:
    path, proof = copied / step_name(2), tmp_path / "proof"
    torch.save([Payload(proof)], path / "evil.distcp")
    index = pickle.loads((path / ".metadata").read_bytes())
    (key,) = (each for each in index.storage_data if "common_state" in each.fqn)
    size = (path / "evil.distcp").stat().st_size
    index.storage_data[key] = replace(
        index.storage_data[key], relative_path="evil.distcp", offset=0, length=size
    )
    (path / ".metadata").write_bytes(pickle.dumps(index))
    seal(path)
    (message,) = run_ranks(1, load_message, path, Precision.bf16)
    assert "is not plain data" in message
    assert not proof.exists()


def test_an_index_that_points_elsewhere_is_refused(copied: Path) -> None:
    path = copied / step_name(2)
    index = pickle.loads((path / ".metadata").read_bytes())
    key = next(iter(index.storage_data))
    index.storage_data[key] = replace(index.storage_data[key], relative_path="../step_00000001/__0_0.distcp")
    (path / ".metadata").write_bytes(pickle.dumps(index))
    seal(path)
    (message,) = run_ranks(1, load_message, path, Precision.bf16)
    assert "points outside its folder" in message


def test_another_precision_is_refused_with_both_ways_out(two: Path) -> None:
    (message,) = run_ranks(1, load_message, two / step_name(2), Precision.fp32)
    assert message == (
        f"{two / step_name(2)} holds its matrices in bf16, and model.precision is fp32. "
        "Set model.precision=bf16, or import the release again with --precision fp32"
    )


def load_into_other_layers(rank: int, path: Path) -> str:
    chunks, optimizer, groups = build_toy(1, Parallel(), Precision.bf16)
    layers = chunks[0].module.layers
    layers["9"] = layers.pop("3")
    return load_message_of((chunks, optimizer, groups), path)


def load_message_of(toy: Toy, path: Path) -> str:
    try:
        load(toy, path)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_missing_and_left_over_tensors_are_refused_by_name(two: Path) -> None:
    (message,) = run_ranks(1, load_into_other_layers, two / step_name(2))
    assert "layers.9.A_log is not in the checkpoint" in message
    assert "and " in message.splitlines()[-1]


def draws() -> list[float]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    values = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    with get_cuda_rng_tracker().fork():
        values.append(float(torch.rand(())))
    return values


def draw_after_save(rank: int, parallel: Parallel, folder: Path) -> list[float]:
    toy = build_toy(2, parallel, Precision.fp32)
    draws()
    save(toy, folder, 1)
    return draws()


def draw_after_load(rank: int, parallel: Parallel, path: Path) -> list[float]:
    toy = build_toy(2, parallel, Precision.fp32)
    load(toy, path)
    return draws()


def test_random_streams_continue_or_are_seeded_anew(tmp_path: Path) -> None:
    saved = run_ranks(2, draw_after_save, Parallel(tp=2), tmp_path)
    path = tmp_path / step_name(1)
    assert run_ranks(2, draw_after_load, Parallel(tp=2), path) == saved
    anew = run_ranks(2, draw_after_load, Parallel(), path)
    assert run_ranks(2, draw_after_load, Parallel(), path) == anew
    assert not {value for rank in anew for value in rank} & {value for rank in saved for value in rank}
    assert anew[0] == anew[1]  # data-parallel ranks share megatron-core's streams
    sharded = run_ranks(2, draw_after_save, Parallel(tp=2), tmp_path / "other")
    assert sharded[0][3] != sharded[1][3]


def save_again(rank: int, folder: Path) -> Any:
    toy = build_toy(1, Parallel(), Precision.fp32)
    train(toy, 1)
    path = save(toy, folder, 1)
    first = path.stat().st_ino
    save(toy, folder, 1)
    kept = path.stat().st_ino
    save(toy, folder, 1, milestone=True)
    marked = (path.stat().st_ino, read_manifest(path).milestone)
    train(toy, 2)
    save(toy, folder, 1, note="another lineage")
    verify(path)
    return first, kept, marked, path.stat().st_ino, read_train_state(path)["note"]


def test_the_same_state_is_not_written_twice_and_another_replaces_it(tmp_path: Path) -> None:
    ((first, kept, marked, other, note),) = run_ranks(1, save_again, tmp_path)
    assert kept == first
    assert marked == (first, True)
    assert other != first
    assert note == "another lineage"
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", step_name(1)}


def children_after_save(rank: int, folder: Path) -> str:
    toy = build_toy(2, Parallel(), Precision.fp32)
    save(toy, folder, 1)
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_a_save_starts_no_process(tmp_path: Path) -> None:
    assert run_ranks(2, children_after_save, tmp_path) == ["", ""]


def load_model_only(rank: int, path: Path) -> Any:
    toy = build_toy(1, Parallel(), Precision.bf16)
    chunks, optimizer, groups = toy
    state = load_checkpoint(path, chunks=chunks, optimizer=None, groups=groups)
    optimizer.reload_model_params()
    masters = {k: v for k, v in tensors(toy).items() if not k.startswith("optimizer.state.exp")}
    return state, masters


def load_all(rank: int, path: Path) -> Any:
    toy = build_toy(1, Parallel(), Precision.bf16)
    load(toy, path)
    return tensors(toy)


def test_a_model_loads_without_an_optimizer(two: Path) -> None:
    ((state, masters),) = run_ranks(1, load_model_only, two / step_name(2))
    (whole,) = run_ranks(1, load_all, two / step_name(2))
    assert state == state_at(2)
    for name, value in masters.items():
        if name.startswith("optimizer."):  # rebuilt from the parameters
            assert torch.equal(value, whole[name.removeprefix("optimizer.state.param.")].float()), name
        else:
            assert torch.equal(value, whole[name]), name


def mix_two_states(rank: int, path: Path, newer: Path) -> str:
    """Parameters of one step with the master weights of another, sealed as one checkpoint."""
    toy = build_toy(1, Parallel(), Precision.bf16)
    load(toy, path)
    train(toy, 7)
    with torch.no_grad():
        for param in toy[0][0].parameters():
            if param.dtype is torch.bfloat16:
                param.view(-1)[0] += 1.0
    save(toy, newer, 8)
    return load_message_of(toy, newer / step_name(8))


def test_parameters_that_are_not_their_master_weights_are_refused(two: Path, tmp_path: Path) -> None:
    (message,) = run_ranks(1, mix_two_states, two / step_name(2), tmp_path)
    assert "master weights differ" in message

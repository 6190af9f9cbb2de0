"""Fault plans: what is refused, and what a point does under a plan."""

from __future__ import annotations

import ast
import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from k3train import faults
from k3train.config.problems import BadInput
from k3train.faults import PLAN_VARIABLE, POINTS, InjectedFault, Kind, plan_from_environment, point, read_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Follow a plan with these faults; gives the file that records them."""

    def start(*entries: dict, rank: int = 0, restart: int = 0) -> Path:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
        log = tmp_path / "log.jsonl"
        (tmp_path / "plan.json").write_text(json.dumps({"faults": entries, "log": str(log)}))
        plan_from_environment()
        return log

    yield start
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    plan_from_environment()
    assert faults._plan is None


def test_points_in_the_program_are_the_documented_ones() -> None:
    called = []
    for file in (ROOT / "k3train").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "point":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{file}:{node.lineno}: name the point literally"
                called.append(name.value)
    assert sorted(called) == sorted(POINTS)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "kill"}, "has no point"),
        ({"point": "step.begin"}, "has no kind"),
        ({"point": "step.begin", "kind": "kil"}, "kind = 'kil' is not known; did you mean kill?"),
        ({"point": "ckpt.befor", "kind": "kill"}, "point = 'ckpt.befor' is not known; did you mean ckpt.be"),
        (
            {"point": "step.begin", "kind": "kill", "ranks": 1},
            "ranks is not a key of a fault; there are point,",
        ),
        ({"point": "step.begin", "kind": "kill", "rank": "1"}, "rank = '1' must be a whole number from 0"),
        (
            {"point": "step.begin", "kind": "kill", "occurrence": 0},
            "occurrence = 0 must be a whole number from 1",
        ),
        ({"point": "step.begin", "kind": "kill", "times": True}, "times = True must be a whole number"),
        ({"point": "step.begin", "kind": "hang", "seconds": -1}, "seconds = -1 must be a number from 0"),
        ({"point": "step.begin", "kind": "slow"}, "kind slow needs seconds"),
        ({"point": "step.begin", "kind": "nan"}, "step.begin has no tensors for kind nan; use step.loss"),
        (
            {"point": "step.weights", "kind": "flip", "tensor": 3},
            "tensor = 3 must be a part of a tensor's name",
        ),
        ("kill", "= 'kill' must be an object"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(tmp_path: Path, entry: object, message: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"faults": [entry]}))
    with pytest.raises(BadInput) as refusal:
        read_plan(tmp_path / "plan.json")
    assert "plan.json: faults[0]" in str(refusal.value)
    assert message in str(refusal.value)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    nested = "[" * 100_000
    for text in (
        None,
        nested,
        "{",
        "[]",
        '{"fault": []}',
        '{"faults": [], "seed": 1}',
        '{"faults": [], "log": 1}',
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(BadInput, match=r"plan\.json"):
            read_plan(file)


def test_without_a_plan_nothing_happens_at_any_point() -> None:
    for name in POINTS:
        point(name, tensors=lambda: pytest.fail("looked at"))


def test_a_fault_happens_on_its_rank_in_its_step_at_its_occurrences(follow: Callable[..., Path]) -> None:
    here = {"point": "step.forward", "kind": "slow", "seconds": 0}
    log = follow(
        here | {"rank": 1},
        here | {"rank": 0},
        here | {"step": 2, "occurrence": 2, "times": 2},
        here | {"restart": None, "step": 3, "times": 0},
        rank=1,
        restart=4,
    )
    for step in (1, 2, 3):
        point("step.begin", step=step)
        for _ in range(4):
            point("step.forward")
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [3, 3, 3, 3]
    log.unlink()
    log = follow(here | {"step": 2, "occurrence": 2, "times": 2, "rank": 1}, here | {"rank": 0}, rank=1)
    for step in (1, 2, 3):
        point("step.begin", step=step)
        for _ in range(4):
            point("step.forward")
    happened = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["step"], each["rank"], each["last"]) for each in happened] == [(2, 1, "step.forward")] * 2


def test_exceptions_are_raised_and_a_full_disk_is_an_oserror(follow: Callable[..., Path]) -> None:
    follow({"point": "step.begin", "kind": "exception"}, {"point": "ckpt.begin", "kind": "enospc"})
    with pytest.raises(InjectedFault, match=r"step\.begin"):
        point("step.begin")
    with pytest.raises(OSError, match="No space left") as full:
        point("ckpt.begin")
    assert full.value.errno == errno.ENOSPC
    point("step.begin")
    point("ckpt.begin")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_changed_in_place(follow: Callable[..., Path], dtype: torch.dtype) -> None:
    tensors = {"a.weight": torch.ones(2, 3, dtype=dtype).T, "b.weight": torch.ones(4, dtype=dtype)}
    tensors["b.weight"].requires_grad_(True)
    for changes in (
        {"kind": Kind.flip, "bit": torch.finfo(dtype).bits - 1, "tensor": "b."},
        {"kind": Kind.nan},
        {"kind": Kind.scale, "factor": 8.0, "tensor": "b."},
    ):
        follow({"point": "step.weights", **changes})
        point("step.weights", tensors=tensors.items)
    assert tensors["b.weight"].tolist() == [-8, 8, 8, 8]
    a = tensors["a.weight"]
    assert a[0, 0].isnan()
    assert a.isnan().sum() == 1
    follow({"point": "step.weights", "kind": "nan", "tensor": "c."})
    with pytest.raises(BadInput, match=r"no tensor's name on this rank contains 'c\.'"):
        point("step.weights", tensors=tensors.items)

"""What `k3train show optim` prints."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from k3train.__main__ import main
from k3train.config.compose import compose
from k3train.optim.show import print_rules


def printed(*overrides: str) -> list[list[str]]:
    stream = io.StringIO()
    print_rules(compose(list(overrides)), Console(file=stream, width=40))
    return [line.split("  ") for line in stream.getvalue().splitlines()]


def line(lines: list[list[str]], start: str) -> list[str]:
    (found,) = ([cell.strip() for cell in each if cell.strip()] for each in lines if each[0].strip() == start)
    return found


def test_k3_s_rules() -> None:
    lines = printed("experiment=k3", "model.mtp.num_layers=0")
    name = "layers.*.attention.q_proj.weight"
    assert line(lines, name) == [
        name,
        "12288 x 7168",
        "Muon, per head: 96 times 128 x 7168",
        "0.1",
        "bf16",
        "69",
    ]
    name = "layers.*.attention.kv_b.weight"
    assert line(lines, name)[2] == "Muon, per head: 96 times 128 x 512 and 128 x 512"
    name = "layers.*.ffn.experts.down"
    assert line(lines, name)[2:] == ["Muon, per expert: 896 times 3072 x 3584", "0.1", "bf16", "92"]
    assert line(lines, "layers.*.attention.A_log")[2:] == ["AdamW", "-", "fp32", "69"]
    assert line(lines, "layers.*.ffn.router.weight")[2:] == ["AdamW", "0.1", "fp32", "92"]


def test_bytes_of_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    def gib(*overrides: str) -> float:
        (text,) = (each[0] for each in printed(*overrides) if each[0].startswith("optimizer state: "))
        return float(text.split()[2].replace(",", ""))

    # bf16: 12 bytes a parameter with AdamW; Muon saves the second moment of all but 0.1 %.
    assert gib("experiment=k3", "optim=adamw") / gib("experiment=k3") == pytest.approx(1.5, abs=0.005)
    # On the host fp32 parameters have master weights too: 12 bytes a parameter in every model.
    fp32 = ("model.precision=fp32", "optim=adamw")
    assert gib(*fp32, "optim.offload=cpu") / gib(*fp32) == pytest.approx(1.5, abs=0.005)
    (line,) = (each[0] for each in printed("optim.offload=cpu") if each[0].startswith("AdamW: "))
    assert line.endswith(", on the host")
    assert main(["show", "optim", "optim=muon"]) == 0
    out = capsys.readouterr().out
    assert "Muon, per head: 2 times 32 x 64" in out
    assert "curriculum" not in out

"""Nothing that was read from outside is run: what the source must not contain."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("k3train", "launch", "data") for path in (ROOT / folder).rglob("*.py"))

UNPICKLERS = {
    "pickle.Unpickler",
    "pickle.load",
    "pickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "pandas.read_pickle",
}
RUNNERS = {"eval", "exec", "hydra.utils.instantiate", "instantiate", "os.system", "os.popen"}
FLAGS = {
    "weights_only": False,
    "allow_pickle": True,
    "trust_remote_code": True,
    "shell": True,
}


def offences(source: str) -> list[str]:
    """What a source may not do, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        flags = {word.arg: word.value for word in node.keywords if word.arg}
        for flag, banned in FLAGS.items():
            value = flags.get(flag)
            if value is not None and not (isinstance(value, ast.Constant) and value.value is not banned):
                found.append(f"{node.lineno}: {name} with {flag}={ast.unparse(value)}")
        if name in UNPICKLERS | RUNNERS:
            found.append(f"{node.lineno}: {name}")
        if name == "torch.load" and "weights_only" not in flags:
            found.append(f"{node.lineno}: torch.load without weights_only")
        if name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"):
            loader = ast.unparse(flags["Loader"]) if "Loader" in flags else ""
            if loader not in ("_Loader", "yaml.SafeLoader"):
                found.append(f"{node.lineno}: {name} with Loader={loader}")
    return found


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.load(path)",
        "pickle.loads(content)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(command, shell=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "hydra.utils.instantiate(config)",
        "eval(text)",
    ],
)
def test_each_offence_is_seen(line: str) -> None:
    assert len(offences(f"x = 1\ny = {line}")) == 1


def test_the_source_runs_nothing_that_it_reads() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := offences(path.read_text(encoding="utf-8")))
    }
    assert found == {}

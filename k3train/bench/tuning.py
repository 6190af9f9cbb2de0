"""Triton kernels that try many settings: fewer of them, and compiled before anything is measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def limit(settings: int) -> None:
    """Let every autotuned kernel of this process try at most ``settings`` settings, evenly chosen; 0: all."""
    import triton.testing
    from triton.runtime import autotuner

    prune = autotuner.Autotuner.prune_configs

    def pruned(self: Any, kwargs: Any) -> Any:
        return spread(list(prune(self, kwargs)), settings)

    autotuner.Autotuner.prune_configs = pruned  # pyright: ignore[reportAttributeAccessIssue]
    # a tenth of Triton's time for each setting: the winner is timed again afterwards
    shorter = functools.partial(triton.testing.do_bench, warmup=3, rep=15)
    triton.testing.do_bench = shorter  # pyright: ignore[reportAttributeAccessIssue]


def spread(settings: list[Any], most: int) -> list[Any]:
    """``most`` of the settings, the first and the last among them; all when ``most`` is 0."""
    n = len(settings)
    if not most or n <= most:
        return settings
    if most == 1:
        return settings[:1]
    return [settings[round(i * (n - 1) / (most - 1))] for i in range(most)]


@contextmanager
def compiling(part: int, parts: int, *, launch: bool) -> Iterator[None]:
    """While this lasts autotuners compile every ``parts``-th setting, from ``part`` on, and tune nothing.

    With ``launch`` they run the first setting, so that what follows reads real numbers; without it no Triton
    kernel is launched at all, and only a process that ends afterwards should use it.
    """
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, **options: Any) -> Any:
        return run(self, *arguments, **{**options, "warmup": True, "grid": (1, 1, 1)})

    def tuned(self: Any, *arguments: Any, **options: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        configs, last = list(self.prune_configs(options)), None
        for config in configs[part::parts]:
            try:
                last = self.fn.run(*arguments, **{**options, **config.all_kwargs(), "warmup": True})
            except Exception as error:  # such as too much shared memory: the tuner will skip it too
                print(f"{self.base_fn.__name__}, {config}: {error!r}"[:200], flush=True)
        return self.fn.run(*arguments, **{**options, **configs[0].all_kwargs()}) if launch else last

    classes = _autotuners()
    before = [each.run for each in classes]
    if not launch:
        JITFunction.run = compiled  # pyright: ignore[reportAttributeAccessIssue]
    for each in classes:
        each.run = tuned
    try:
        yield
    finally:
        JITFunction.run = run
        for each, old in zip(classes, before, strict=True):
            each.run = old


def _autotuners(base: Any = None) -> list[Any]:
    """Triton's class and those that packages imported so far derive from it."""
    if base is None:
        from triton.runtime import autotuner

        base = autotuner.Autotuner
    return [base, *(each for derived in base.__subclasses__() for each in _autotuners(derived))]

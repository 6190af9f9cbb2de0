"""The real commands, each in a process of its own that is forked from the warm one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from k3train.backend.start import end_process


def command(
    main: Callable[[list[str]], int], arguments: list[str], log: Path, **environment: str
) -> tuple[int, str]:
    """Exit code of ``main(arguments)`` and what it printed, which also lies in ``log``."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ.update(environment)
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        end_process(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")

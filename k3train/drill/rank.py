"""A rank that starts warm: the fork server imports this file once, and every rank is a fork of it.

It is the program of ``python -m k3train.train`` without the seconds that its imports take.
"""

from __future__ import annotations

import os

from k3train.backend.start import end_process, start_backend
from k3train.config.schema import Device

start_backend(Device.cpu)

import torch._dynamo  # noqa: E402  the first use of a custom operator would import it, in every rank
import torch._inductor  # noqa: E402, F401

import k3train.train.loop  # noqa: E402, F401  megatron-core must find the backend ready
from k3train.faults import PLAN_VARIABLE  # noqa: E402
from k3train.train.__main__ import main  # noqa: E402


def rank(resolved: str, plan: str) -> None:
    """Train the run of the file ``resolved`` under the fault plan in the file ``plan``.

    Ends the process with the rank's code unless that is 0.
    """
    os.environ[PLAN_VARIABLE] = plan
    code = main([resolved])
    if code:
        end_process(code)

"""What happens in the place of a launch of our Triton kernels, where there is no GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from kernels.available import INTERPRET

KERNELS = ("attention", "rms_norm", "rotary", "silu_and_mul", "step_attention", "store_kv")


@contextmanager
def launches_replaced(run: Callable[..., None]) -> Iterator[None]:
    """Within it run(kernel, *arguments, grid=..., warmup=..., **named) stands for each launch.

    Tensors may be on any device: the launchers take them as they do for Triton's interpreter.
    """
    from triton.runtime.jit import JITFunction

    # Made to be compiled, and not to be interpreted, before the variable is set.
    for module in KERNELS:
        importlib.import_module(f"kernels.{module}")
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.dict("os.environ", {INTERPRET: "1"}),
    ):
        yield

"""Keeps torch.compile out of the backend's own Python.

C++ calls these methods while a compiled model runs, and the compiler would take them for a part of the model: it fails
at the first attribute of a process group that it does not know.
"""

from __future__ import annotations

import types
from typing import Any

import torch


def eager_only(*classes: type) -> None:
    """Let the compiler leave these classes' methods, and all that they call, as they are.

    What `torch.compiler.disable` does, without the second that the import of the compiler takes.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for each in classes:
        for method in vars(each).values():
            function = method.fget if isinstance(method, property) else method
            if isinstance(function, types.FunctionType):
                frames.set_code_exec_strategy(function.__code__, skip)

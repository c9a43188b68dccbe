"""The C functions that were compiled when dure was installed."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from typing import Any


@functools.cache
def compiled_function(
    module: str, name: str, *arguments: type, returns: type | None = None
) -> Callable[..., Any] | None:
    """A function of one of dure's extension modules, of these ctypes arguments and this result.

    None where there is none, as after an installation without a C compiler: the caller has another way. The module
    holds plain C, so it is loaded as a library, never imported. The number at the end of a name goes up with every
    change of what the function takes: a module that an older version left is then not called by mistake.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    try:
        function = getattr(ctypes.CDLL(found.origin), name)
    except (OSError, AttributeError):  # for another machine, or of another version
        return None
    function.argtypes = arguments
    function.restype = returns
    typed: Callable[..., Any] = function
    return typed

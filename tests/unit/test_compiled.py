"""A C function that is not there, or not what it should be, is None and never called."""

import ctypes
import importlib.util

import pytest

from dure.base.compiled import compiled_function

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("dure.comm.reduce._treesum") is None,
    reason="dure was installed without a C compiler",
)


@needs_compiler
def test_a_function_comes_with_the_arguments_that_it_takes():
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float)
    function = compiled_function("dure.comm.reduce._treesum", "dure_tree_sum_4", *types)
    assert function.argtypes == types
    with pytest.raises(ctypes.ArgumentError):
        function("a", "b", "c", "d")


@needs_compiler
def test_a_function_of_another_version_is_none():
    assert compiled_function("dure.comm.reduce._treesum", "dure_tree_sum_0") is None


def test_without_a_compiler_there_is_none():
    assert compiled_function("dure.comm.reduce._never_compiled", "dure_tree_sum_4") is None


def test_a_module_that_is_no_library_of_this_machine_is_none():
    assert compiled_function("dure.base.compiled", "dure_tree_sum_4") is None

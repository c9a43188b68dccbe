"""The one part that is compiled: the reduce's inner loop. Everything else stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "dure.reduce._treesum",
            ["src/dure/reduce/treesum.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-std=c11"],
            optional=True,  # without a compiler the installation goes on, and torch does the same, slower
        )
    ]
)

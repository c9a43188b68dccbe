"""The compiled parts: tree sum, barrier, collectives, copies past the caches. All else is in pyproject.toml."""

from setuptools import Extension, setup


def compiled(name: str, *sources: str) -> Extension:
    """Without a compiler the installation goes on, and Python and torch do the same, slower."""
    options = ["-O3", "-ffp-contract=off", "-std=c11"]
    return Extension(name, list(sources), extra_compile_args=options, optional=True)


setup(
    ext_modules=[
        compiled("dure.comm.reduce._treesum", "src/dure/comm/reduce/treesum.c"),
        compiled("dure.comm._shm_barrier", "src/dure/comm/shm_barrier.c"),
        compiled("dure.device._copying", "src/dure/device/copying.c"),
        compiled(
            "dure.comm.backend._collectives",
            "src/dure/comm/backend/collectives.c",
            "src/dure/comm/reduce/treesum.c",
            "src/dure/comm/shm_barrier.c",
        ),
    ]
)

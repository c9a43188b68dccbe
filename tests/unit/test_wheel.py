"""What is in the wheel: all that an installed dure needs, and nothing that only tests need."""

import re
import zipfile

import pytest
from support.commands import ROOT
from support.wheels import build_wheel

SOURCE = ROOT / "src"
MADE = {".pyc", ".so"}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as wheel:
        return set(wheel.namelist())


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(names):
    """C sources too: `dure doctor` compares hashes of the sources between nodes."""
    wanted = {
        str(path.relative_to(SOURCE))
        for path in (SOURCE / "dure").rglob("*")
        if path.is_file() and path.suffix not in MADE
    }
    packaged = {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}
    assert packaged == wanted


def test_the_wheel_has_what_the_demo_reads(names):
    assert {"dure/tools/demo/cats.toml", "dure/tools/demo/ddp.py"} <= names


def test_the_wheel_has_no_tests_and_one_top_level_name(names):
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"dure"}
    assert not [
        name for name in names if re.search(r"(^|/)(tests?/|test_|conftest)", name)
    ]  # `dure selftest` is no test of ours


def test_the_wheel_has_the_compiled_parts_and_a_source_for_each(names):
    compiled = sorted(name.rsplit("/", 1)[1].split(".")[0] for name in names if name.endswith(".so"))
    assert compiled == ["_collectives", "_copying", "_shm_barrier", "_treesum"]
    sources = {name.rsplit("/", 1)[1] for name in names if name.endswith(".c")}
    assert sources == {f"{name.removeprefix('_')}.c" for name in compiled}


def test_the_wheel_has_the_licence_and_the_command(names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)

"""What goes into an image, and what is left out."""

from importlib.metadata import PathDistribution

import pytest

from dure.base.errors import UsageError
from dure.image.contents import (
    Entry,
    folder_entries,
    in_order,
    system_entries,
    wanted_of_package,
    wanted_of_project,
    wanted_of_standard,
)
from dure.image.packages import chosen, distribution_entries, editable_entries, normal_name, script_entries


@pytest.fixture
def folder(tmp_path):
    for name in (
        "torch/__init__.py", "torch/bin/torch_shm_manager", "torch/bin/protoc", "torch/include/a.h",
        "torch/lib/libc10.so", "torch/lib/libx.a", "torch/test/atest", "torch/testing/__init__.py",
        "torch/__pycache__/x.pyc", "torch/py.typed", "torch/share/cmake/x.txt", "runs/one/state",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def paths(entries):
    return sorted(entry.path for entry in entries)


def test_of_a_package_what_runs_goes_in_and_tests_headers_and_static_libraries_do_not(folder):
    assert paths(folder_entries(folder / "torch", "/t/torch", lambda path: wanted_of_package(f"torch/{path}"))) == [
        "/t/torch/__init__.py", "/t/torch/bin/torch_shm_manager", "/t/torch/lib/libc10.so", "/t/torch/py.typed",
        "/t/torch/testing/__init__.py",
    ]  # fmt: skip


def test_a_projects_own_tests_and_headers_go_in_but_no_earlier_runs(folder):
    packed = paths(folder_entries(folder, "/project", wanted_of_project))
    assert "/project/torch/test/atest" in packed
    assert "/project/torch/include/a.h" in packed
    assert not [path for path in packed if "runs" in path or "__pycache__" in path]
    assert not wanted_of_standard("idlelib/run.py")
    assert not wanted_of_standard("config-3.11-x86_64-linux-gnu/libpython3.11.a")
    assert not wanted_of_standard("site-packages/x.py")
    assert wanted_of_standard("json/decoder.py")


def test_links_stay_links_only_where_they_stay_inside(folder):
    outside = folder / "outside"
    outside.write_text("text")
    (folder / "torch" / "a.py").symlink_to("__init__.py")
    (folder / "torch" / "b.py").symlink_to(outside)
    (folder / "torch" / "nowhere").symlink_to("gone")
    entries = {entry.path: entry for entry in folder_entries(folder / "torch", "/t", wanted_of_package)}
    assert entries["/t/a.py"].link == "__init__.py"
    assert entries["/t/b.py"].link is None
    assert "/t/nowhere" not in entries
    (folder / "torch" / "more").symlink_to(folder / "runs")
    with pytest.raises(UsageError, match="links to the folder"):
        list(folder_entries(folder / "torch", "/t", wanted_of_package))


def test_every_path_stands_once_after_the_folders_above_it():
    entries = in_order(
        [Entry("/b/c/d", data=b"1"), Entry("/a", link="b"), Entry("/b/c/d", data=b"2"), Entry("/b-c")]
    )
    assert [entry.path for entry in entries] == ["/a", "/b", "/b/c", "/b/c/d", "/b-c"]
    assert entries[3].data == b"1"


def test_mount_points_are_made_beforehand():
    made = paths(system_entries())
    for path in (
        "/mnt/shared",
        "/proc",
        "/dev/shm",
        "/sys",
        "/tmp",
        "/run",
        "/etc/passwd",
        "/etc/nsswitch.conf",
    ):
        assert path in made


def test_chosen_packages_bring_what_they_require_and_nothing_else():
    names = [normal_name(found.metadata["Name"]) for found in chosen(["typer"])]
    assert {"typer", "rich"} <= set(names)
    assert not {"torch", "pytest", "pip"} & set(names)
    assert len(names) < 15
    with pytest.raises(UsageError, match="--packages names no-such-thing, not installed"):
        chosen(["no-such-thing"])


def test_a_package_installed_by_a_path_is_packed_as_if_it_were_installed(tmp_path):
    source, installed = tmp_path / "checkout" / "src", tmp_path / "mine-1.0.dist-info"
    (source / "mine" / "deep").mkdir(parents=True)
    (source / "mine" / "__init__.py").touch()
    (source / "mine" / "deep" / "part.py").touch()
    (source / "notes").mkdir()
    installed.mkdir()
    (installed / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (installed / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    (installed / "entry_points.txt").write_text("[console_scripts]\nmine = mine.deep:Tool.main\n")
    (installed / "RECORD").write_text("__editable__.mine-1.0.pth,,\nmine-1.0.dist-info/METADATA,,\n")
    (tmp_path / "__editable__.mine-1.0.pth").write_text(f"{source}\n")
    found = PathDistribution(installed)
    assert paths(distribution_entries(found, "/s")) == ["/s/mine-1.0.dist-info/METADATA"]
    assert paths(editable_entries(found, "/s")) == ["/s/mine/__init__.py", "/s/mine/deep/part.py"]
    (script,) = script_entries(found)
    assert (script.path, script.executable) == ("/opt/dure/bin/mine", True)
    assert script.data == (
        b"#!/opt/dure/bin/python\nimport sys\nfrom mine.deep import Tool\nsys.exit(Tool.main())\n"
    )
    (tmp_path / "__editable__.mine-1.0.pth").write_text("import __editable___mine_finder\n")
    with pytest.raises(UsageError, match="mine is installed editable in a way that names no folder"):
        list(editable_entries(found, "/s"))

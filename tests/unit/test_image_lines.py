"""The exact command lines of every runner, and that no name or path can break out of them."""

import shlex
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import dure

from dure.base.errors import JobError, UsageError
from dure.image.mounts import Mounted, in_order, parse_mount, written
from dure.image.runner import (
    ContainerSpec,
    apptainer_command,
    bubblewrap_command,
    enroot_command,
    import_command,
    own_command,
    pyxis_options,
)

IMAGE = "/mnt/shared/pytorch_squash.sqsh"
MOUNTS = (
    Mounted("/mnt/shared", "/mnt/shared"),
    Mounted("/mnt/shared/checkpoints", "/mnt/shared/checkpoints", writable=True),
)
PLACE = ContainerSpec(
    IMAGE, MOUNTS, {"DURE_IMAGE": "ab12", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}, "/mnt/shared"
)
COMMAND = ["/opt/dure/bin/python", "-m", "dure", "train", "/mnt/shared/job.toml"]

HOSTILE = [
    "a b", "a'b", 'a"b', "$(touch /tmp/broke-out)", "`id`", "a;b", "a|b", "a&b", "a\nb", "a:b", "a,b", "a\\b", "-rf",
    "$HOME", "{storage}", "*", "가 나",
]  # fmt: skip
names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=12).filter(
    lambda name: name not in {".", ".."}
)
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: "/data/" + "/".join(parts))


def test_pyxis_line():
    assert pyxis_options(PLACE) == [
        "--container-image=/mnt/shared/pytorch_squash.sqsh",
        "--container-mounts=/mnt/shared:/mnt/shared:ro,/mnt/shared/checkpoints:/mnt/shared/checkpoints:rw",
        "--container-readonly",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--no-container-entrypoint",
        "--container-workdir=/mnt/shared",
        "--container-env=DURE_IMAGE,GLOO_SOCKET_IFNAME,OMP_NUM_THREADS",
        "--export=DURE_IMAGE=ab12,GLOO_SOCKET_IFNAME=eth0,OMP_NUM_THREADS=1",
    ]


def test_enroot_line():
    assert enroot_command(PLACE, COMMAND) == [
        "enroot", "start",
        "--mount", "/mnt/shared:/mnt/shared:x-create=auto,rbind,ro",
        "--mount", "/mnt/shared/checkpoints:/mnt/shared/checkpoints:x-create=auto,rbind,rw",
        "--env", "DURE_IMAGE=ab12",
        "--env", "GLOO_SOCKET_IFNAME=eth0",
        "--env", "OMP_NUM_THREADS=1",
        "--", "/mnt/shared/pytorch_squash.sqsh",
        "/opt/dure/bin/python", "-m", "dure", "train", "/mnt/shared/job.toml",
    ]  # fmt: skip


def test_apptainer_line():
    assert apptainer_command(PLACE, COMMAND, gpus=True) == [
        "env",
        "APPTAINERENV_DURE_IMAGE=ab12",
        "APPTAINERENV_GLOO_SOCKET_IFNAME=eth0",
        "APPTAINERENV_OMP_NUM_THREADS=1",
        "apptainer", "exec", "--cleanenv", "--no-eval", "--no-home", "--contain", "--nv",
        "--bind", "/dev/shm:/dev/shm:rw",
        "--bind", "/mnt/shared:/mnt/shared:ro",
        "--bind", "/mnt/shared/checkpoints:/mnt/shared/checkpoints:rw",
        "--pwd", "/mnt/shared",
        "/mnt/shared/pytorch_squash.sqsh",
        "/opt/dure/bin/python", "-m", "dure", "train", "/mnt/shared/job.toml",
    ]  # fmt: skip
    singularity = apptainer_command(PLACE, COMMAND, program="singularity")
    assert "SINGULARITYENV_OMP_NUM_THREADS=1" in singularity
    assert "--nv" not in singularity


def test_our_own_line():
    assert own_command("/usr/bin/python3", PLACE, COMMAND, "ab12") == [
        "/usr/bin/python3", "-m", "dure", "image", "run",
        "--mount", "/mnt/shared:/mnt/shared:ro",
        "--mount", "/mnt/shared/checkpoints:/mnt/shared/checkpoints:rw",
        "--digest", "ab12",
        "--workdir", "/mnt/shared",
        "--", "/mnt/shared/pytorch_squash.sqsh",
        "/opt/dure/bin/python", "-m", "dure", "train", "/mnt/shared/job.toml",
    ]  # fmt: skip


def test_bubblewrap_line():
    line = bubblewrap_command(
        "/tree", MOUNTS, COMMAND, workdir="/mnt/shared", host_data=[(7, "/etc/hosts")],
        devices=["/dev/nvidia0"], info_fd=9, map_user=(1000, 1001),
    )  # fmt: skip
    stub = line.index("-c") + 1
    line[stub] = "…"
    assert line == [
        "bwrap", "--die-with-parent", "--unshare-pid", "--info-fd", "9",
        "--unshare-user", "--uid", "1000", "--gid", "1001",
        "--ro-bind", "/tree/opt/dure", "/opt/dure", "--ro-bind", "/tree/usr", "/usr", "--ro-bind", "/tree/etc", "/etc",
        "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin",
        "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
        "--proc", "/proc", "--dev", "/dev", "--bind", "/dev/shm", "/dev/shm", "--ro-bind", "/sys", "/sys",
        "--dev-bind", "/dev/nvidia0", "/dev/nvidia0",
        "--perms", "1777", "--tmpfs", "/tmp", "--perms", "1777", "--tmpfs", "/run",
        "--perms", "1777", "--tmpfs", "/var/tmp",
        "--perms", "0644", "--ro-bind-data", "7", "/etc/hosts",
        "--ro-bind", "/mnt/shared", "/mnt/shared",
        "--bind", "/mnt/shared/checkpoints", "/mnt/shared/checkpoints",
        "--remount-ro", "/", "--chdir", "/mnt/shared", "--cap-drop", "CAP_SYS_ADMIN",
        "--", "/opt/dure/bin/python", "-I", "-S", "-c", "…",
        "/opt/dure/bin/python", "-m", "dure", "train", "/mnt/shared/job.toml",
    ]  # fmt: skip


def test_conversion_lines():
    assert import_command("enroot", "docker://nvcr.io#nvidia/pytorch:25.09-py3", "/out/a.sqsh") == [
        "enroot", "import", "--output", "/out/a.sqsh", "--", "docker://nvcr.io#nvidia/pytorch:25.09-py3",
    ]  # fmt: skip
    assert import_command("apptainer", "docker://pytorch/pytorch", "/out/a.sif") == [
        "apptainer", "build", "/out/a.sif", "docker://pytorch/pytorch",
    ]  # fmt: skip


def test_a_conversion_is_shown_without_being_done():
    ran = dure(
        "image", "build", "--from", "docker://a/b:c", "-o", "/out/a b.sqsh", "--dry-run", PATH="/nowhere"
    )
    assert (ran.code, ran.out) == (0, "enroot import --output '/out/a b.sqsh' -- docker://a/b:c\n")
    assert "write it as docker://" in dure("image", "build", "--from", "http://x", "--dry-run").err
    assert "neither is installed" in dure("image", "build", "--from", "docker://x", PATH="/nowhere").err


@pytest.mark.parametrize("name", HOSTILE)
def test_what_pyxis_and_enroot_cannot_say_is_refused_by_name(name):
    place = ContainerSpec(IMAGE, (Mounted(f"/data/{name}", "/data/x"),))
    if name in {"-rf"}:
        assert "/data/-rf:" in pyxis_options(place)[1]
        return
    for line in (lambda: pyxis_options(place), lambda: enroot_command(place, ["true"])):
        with pytest.raises(JobError, match="rename it"):
            line()
    with pytest.raises(JobError, match="rename it"):
        enroot_command(ContainerSpec(f"/data/{name}.sqsh"), ["true"])


@pytest.mark.parametrize("name", ["a:b", "a,b", "a\\b", 'a"b', "a\nb"])
def test_what_apptainer_cannot_say_is_refused_by_name(name):
    with pytest.raises(JobError, match="apptainer's --bind cannot say"):
        apptainer_command(ContainerSpec(IMAGE, (Mounted("/data/x", f"/data/{name}"),)), ["true"])


def test_values_that_a_runner_would_split_are_refused_or_kept_whole():
    place = ContainerSpec(IMAGE, environment={"NCCL_IB_HCA": "mlx5_0,mlx5_1"})
    with pytest.raises(JobError, match="NCCL_IB_HCA"):
        pyxis_options(place)
    with pytest.raises(JobError, match="line break"):
        enroot_command(ContainerSpec(IMAGE, environment={"DURE_X": "a\nDURE_Y=b"}), ["true"])
    assert "APPTAINERENV_NCCL_IB_HCA=mlx5_0,mlx5_1" in apptainer_command(place, ["true"])


def test_an_image_by_a_relative_path_is_refused():
    for line in (
        pyxis_options,
        lambda place: enroot_command(place, []),
        lambda place: own_command("p", place, []),
    ):
        with pytest.raises(JobError, match="absolute"):
            line(ContainerSpec("x.sqsh"))


@given(source=paths, target=paths, writable=st.booleans(), arguments=st.lists(names, max_size=3))
def test_every_path_is_one_argument_of_ours_and_comes_back_as_it_was(source, target, writable, arguments):
    mount = Mounted(source, target, writable)
    assert parse_mount(written(mount)) == mount
    line = own_command("python3", ContainerSpec("/x.sqsh", (mount,)), arguments)
    assert line[line.index("--mount") + 1] == written(mount)
    assert line[line.index("--") + 2 :] == arguments
    inner = bubblewrap_command("/tree", (mount,), arguments)
    at = inner.index("--remount-ro")
    assert inner[at - 3 : at] == ["--bind" if writable else "--ro-bind", source, target]


@given(
    source=paths,
    target=paths,
    value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
)
def test_a_line_for_another_runner_has_the_same_fields_whatever_the_names_or_is_refused(
    source, target, value
):
    place = ContainerSpec("/x.sqsh", (Mounted(source, target),), {"DURE_X": value})
    plain = ContainerSpec("/x.sqsh", (Mounted("/data/s", "/data/t"),), {"DURE_X": "v"})
    for line in (
        pyxis_options,
        lambda place: enroot_command(place, ["true"]),
        lambda place: apptainer_command(place, ["true"]),
    ):
        try:
            made = line(place)
        except JobError:
            continue
        assert len(made) == len(line(plain))
        (mount,) = [word for word in made if target in word and source in word and "/dev/shm" not in word]
        assert mount.partition("=")[2].count(":") == 2 or mount.count(":") == 2
        assert mount.count(",") == line(plain)[made.index(mount)].count(",")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=paths, arguments=st.lists(names, min_size=1, max_size=3))
def test_a_quoted_line_survives_a_real_shell(source, arguments):
    line = own_command("python3", ContainerSpec("/x.sqsh", (Mounted(source, source),)), arguments)
    shown = subprocess.run(
        ["sh", "-c", f"""printf '%s\\0' {shlex.join(line)}"""], capture_output=True, timeout=300, check=True
    ).stdout
    assert shown.decode().split("\0")[:-1] == line


@pytest.mark.parametrize(
    "text", ["relative", "relative:/x", "/x:relative", "/a/../b", "/x:/y:/z", "", "/x::rw", ":"]
)
def test_a_mount_that_is_not_plain_is_refused(text):
    with pytest.raises(UsageError, match="--mount"):
        parse_mount(text)


@pytest.mark.parametrize(
    "target", ["/", "/opt", "/opt/dure/lib", "/usr", "/etc/x", "/lib", "/proc", "/dev/shm"]
)
def test_a_target_that_hides_the_interpreter_is_refused(target):
    with pytest.raises(JobError, match="hide the image's own"):
        in_order([Mounted("/data", target)])


def test_mounts_come_outer_before_inner_and_never_two_of_one_target():
    outer, inner, other = Mounted("/c", "/mnt/a"), Mounted("/b", "/mnt/a/x"), Mounted("/a", "/mnt/a-b")
    assert in_order([inner, other, outer]) == (outer, inner, other)
    with pytest.raises(JobError, match="two mounts have the target /mnt/a: /c and /d"):
        in_order([outer, Mounted("/d", "/mnt/a")])

"""A job's mounts: what is read-only, what is not, and what is refused before anything starts."""

from pathlib import Path

import pytest

from dure.base.errors import JobError
from dure.config import load_job
from dure.image.enter import image_of
from dure.image.environment import passed
from dure.image.mounts import Mounted, check_there, make_written_folders, mounts_of

JOB = """
storage = "{storage}"
[model]
factory = "model.py:model"
[data]
factory = "model.py:data"
global_batch = 8
[train]
steps = 1
"""


@pytest.fixture
def shared(tmp_path):
    shared = tmp_path / "shared"
    (shared / "job").mkdir(parents=True)
    (shared / "checkpoints").mkdir()
    return shared


def job(shared, more="", storage=None, path=None):
    path = path or shared / "job" / "job.toml"
    path.write_text(JOB.replace("{storage}", storage or str(shared)) + more)
    return load_job(path)


def test_by_default_only_the_run_and_its_checkpoints_can_be_written(shared):
    run = shared / "checkpoints" / "run-1"
    assert mounts_of(job(shared), run) == (
        Mounted(str(shared), str(shared)),
        Mounted(str(run), str(run), writable=True),
        Mounted(str(shared / "job"), str(shared / "job")),
    )
    assert not run.exists()
    elsewhere = shared / "more" / "run-1"
    more = '[checkpoint]\nfolder = "{storage}/more/{run}"\n'
    assert Mounted(str(elsewhere), str(elsewhere), writable=True) in mounts_of(job(shared, more), run)


def test_folders_that_the_run_writes_to_are_made_outside(shared):
    run = shared / "checkpoints" / "run-1"
    loaded = job(shared, '[checkpoint]\nfolder = "{storage}/more/{run}"\n')
    make_written_folders(loaded, run, mounts_of(loaded, run))
    assert run.is_dir()
    assert (shared / "more" / "run-1").is_dir()


def test_checkpoints_outside_every_read_write_mount_are_refused_with_the_way_out(shared):
    more = '[[cluster.mounts]]\nsource = "{storage}"\n'
    with pytest.raises(
        JobError, match=r"the run's folder is .*run-1, but inside the image it is on the mount .*shared,"
    ):
        mounts_of(job(shared, more), shared / "checkpoints" / "run-1")
    more += '[[cluster.mounts]]\nsource = "{storage}/checkpoints"\nwritable = true\n'
    assert mounts_of(job(shared, more), shared / "checkpoints" / "run-1")[1].writable
    more = '[checkpoint]\nfolder = "/elsewhere/deep"\n' + more
    with pytest.raises(
        JobError, match=r'checkpoint.folder is /elsewhere/deep, .*no mount covers it; .*source = "/else'
    ):
        mounts_of(job(shared, more), shared / "checkpoints" / "run-1")


def test_a_read_only_mount_within_a_read_write_one_refuses_too(shared):
    more = '[[cluster.mounts]]\nsource = "{storage}"\nwritable = true\n'
    more += '[[cluster.mounts]]\nsource = "{storage}/checkpoints"\n'
    with pytest.raises(JobError, match="checkpoints, which is read-only"):
        mounts_of(job(shared, more), shared / "checkpoints" / "run-1")


def test_targets_are_what_counts_inside(shared):
    more = '[[cluster.mounts]]\nsource = "{storage}"\ntarget = "/mnt/shared"\n'
    more += '[[cluster.mounts]]\nsource = "{storage}/checkpoints"\nwritable = true\n'
    more += 'target = "/mnt/shared/checkpoints"\n'
    more += '[[cluster.mounts]]\nsource = "{storage}/job"\n'
    run = Path("/mnt/shared/checkpoints/run-1")
    loaded = job(shared, more)
    mounts = mounts_of(loaded, run)
    make_written_folders(loaded, run, mounts)
    assert (shared / "checkpoints" / "run-1").is_dir()
    with pytest.raises(JobError, match="no mount covers it"):
        mounts_of(loaded, shared / "checkpoints" / "run-1")


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ('source = "relative"', "relative or has '..'"),
        ('source = "/data/../etc"', "relative or has '..'"),
        ('source = "{run}"\ntarget = "x"', "relative or has '..'"),
        ('source = "/not/there/at/all"', "/not/there/at/all is not there on this node"),
        ('source = "{storage}"\ntarget = "/opt"', "hide the image's own /opt/dure"),
        ('source = "{storage}"\ntarget = "/usr/lib"', "hide the image's own /usr"),
    ],
)
def test_mounts_that_cannot_be_are_refused(shared, mount, says):
    run = shared / "checkpoints" / "run-1"
    more = '[[cluster.mounts]]\nsource = "{storage}"\nwritable = true\n[[cluster.mounts]]\n' + mount
    with pytest.raises(JobError, match=says):
        mounts_of(job(shared, more), run)


def test_a_target_needs_a_place_in_the_mount_that_it_is_within(shared, tmp_path):
    fast = tmp_path / "fast"
    fast.mkdir()
    outer, inner = Mounted(str(shared), "/mnt/shared"), Mounted(str(fast), "/mnt/shared/fast", writable=True)
    with pytest.raises(JobError, match=r"within the mount /mnt/shared, .* make .*/shared/fast first"):
        check_there([outer, inner])
    (shared / "fast").mkdir()
    check_there([outer, inner])


def test_files_that_the_job_names_have_to_be_mounted(shared, tmp_path):
    run = shared / "checkpoints" / "run-1"
    more = '[[cluster.mounts]]\nsource = "{storage}/checkpoints"\nwritable = true\n'
    with pytest.raises(
        JobError, match=r"model.factory is .*model.py, but inside the image no mount covers it"
    ):
        mounts_of(job(shared, more), run)


def test_a_bucket_needs_no_mount_and_cannot_be_one(shared, tmp_path):
    run = tmp_path / "run-1"
    loaded = job(shared, storage="s3://bucket/x")
    assert [mount.source for mount in mounts_of(loaded, run)] == [str(run), str(shared / "job")]
    with pytest.raises(JobError, match="a bucket needs no mount"):
        mounts_of(job(shared, '[[cluster.mounts]]\nsource = "{storage}"\n', storage="s3://bucket/x"), run)


def test_a_job_file_that_is_a_link_brings_the_folder_it_leads_to(shared, tmp_path):
    real = tmp_path / "elsewhere"
    real.mkdir()
    job(shared, path=real / "job.toml")
    link = shared / "job" / "job.toml"
    link.symlink_to(real / "job.toml")
    mounts = mounts_of(load_job(link), shared / "checkpoints" / "run", link)
    assert Mounted(str(real), str(real)) in mounts


def test_an_image_that_is_not_there_is_refused_with_the_command_that_makes_it(shared):
    loaded = job(shared, '[cluster]\nimage = "x.sqsh"\n')
    with pytest.raises(JobError, match=r"there is no such file; `dure image build -o .*/shared/x.sqsh`"):
        image_of(loaded)
    (shared / "x.sqsh").touch()
    assert image_of(loaded) == shared / "x.sqsh"
    assert image_of(job(shared)) is None


def test_only_named_variables_pass():
    wanted = {
        "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.0.1.10", "OMP_NUM_THREADS": "1", "RANK": "3",
        "SLURM_NODEID": "1",
    }  # fmt: skip
    unwanted = {
        "HOME": "/root", "PATH": "/bin", "LD_PRELOAD": "x.so", "PYTHONPATH": "/src", "SECRET": "s",
        "BASH_FUNC_x%%": "()", "DURE_IMAGE": "older",
    }  # fmt: skip
    assert passed({**unwanted, **wanted}, "ab12") == {"LANG": "C.UTF-8", **wanted, "DURE_IMAGE": "ab12"}


def made_image(shared, runner, more=""):
    (shared / "x.sqsh").write_bytes(b"hsqs" + bytes(100))
    return job(shared, f'[cluster]\nimage = "x.sqsh"\nrunner = "{runner}"\n{more}')


def test_a_node_that_does_not_know_the_run_yet_mounts_the_folder_of_all_runs(shared):
    runs = shared / "checkpoints"
    loaded = made_image(shared, "bubblewrap", '[checkpoint]\nfolder = "{storage}/more/{run}/x"\n')
    mounts = mounts_of(loaded, runs, of_any_run=True)
    assert {mount.target for mount in mounts if mount.writable} == {str(runs), str(shared / "more")}

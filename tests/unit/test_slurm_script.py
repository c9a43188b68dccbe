"""The batch script: what it says, and that nothing in a name or a path is ever read as shell or as an option."""

import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from dure.base.errors import UsageError
from dure.base.team_key import read_key_file
from dure.engine.slurm.quoting import file_pattern, sbatch_word, shell_word, variable
from dure.engine.slurm.request import Request, _check_option, _seconds
from dure.engine.slurm.script import script
from dure.image.mounts import Mounted
from dure.image.runner import ContainerSpec, pyxis_options

GOLDEN = Path(__file__).with_name("slurm_scripts")
PLAIN = Request(
    name="cats",
    train=("/opt/dure/bin/python", "-m", "dure", "train", "/shared/cats.toml"),
    runs=Path("/shared/checkpoints"),
    run=None,
    work=Path("/shared"),
    nodes=2,
    min_nodes=2,
    ranks=4,
    cpus_per_node=4,
    time="2:00:00",
)
REQUESTS = {
    "plain": PLAIN,
    "one_node": replace(PLAIN, nodes=1, min_nodes=1, ranks=1, cpus_per_node=1, time=None),
    "elastic": replace(PLAIN, min_nodes=1),
    "unsaved": replace(PLAIN, resumable=False),
    "pyxis": replace(
        PLAIN,
        train=("/opt/dure/bin/python", *PLAIN.train[1:]),
        srun_options=tuple(
            option.replace("cats-N", f"cats-{variable('job')}")
            for option in pyxis_options(
                ContainerSpec(
                    "/shared/pytorch_squash.sqsh",
                    (
                        Mounted("/shared", "/shared"),
                        Mounted("/shared/checkpoints/cats-N", "/shared/checkpoints/cats-N", writable=True),
                    ),
                    {"DURE_IMAGE": "0f" * 32},
                    "/shared",
                )
            )
        ),
    ),
    "everything": replace(
        PLAIN,
        run=Path("/shared/my runs/it's 100% $HOME"),
        train=(*PLAIN.train, "--set=train.lr=0.1", "--set=name='a b'"),
        gpus_per_node=8,
        partition="gpu",
        account="team a",
        signal_seconds=300,
        requeues=3,
        options=("--constraint=g5&efa", "--exclusive", "--mail-user=a@b"),
    ),
}
HOSTILE = [
    *("a b", "it's", 'say "hi"', "$(touch pwned)", "`touch pwned`", "$HOME ${x}", "\\", "a\\", "-rf", "--", "..", "*"),
    *("; touch pwned", "&& touch pwned", "| cat", "> pwned", "#", "a # b", "!!", "~", "{a,b}", "한글 ü 🐈", "%j %%"),
    *("a\nb", "\n#SBATCH --uid=0\n", "'\ntouch pwned\n'", "\t", "\r", "$'\\n'", "EOF", "\x1b[31m", "'\"'\"'", ""),
]  # fmt: skip
nasty = st.sampled_from(HOSTILE) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
names_of_files = nasty.map(lambda text: text.replace("/", "_")).filter(
    lambda text: text not in ("", ".", "..")
)


def needs_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (tools/system-packages installs it)")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_script_is_the_one_that_was_read_and_approved(name):
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(script(REQUESTS[name]))
    assert script(REQUESTS[name]) == path.read_text()


@pytest.mark.parametrize("name", REQUESTS)
def test_shellcheck_has_nothing_to_say(name):
    needs_shellcheck()
    checked = subprocess.run(
        ["shellcheck", "-"],
        input=script(REQUESTS[name]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.stdout == ""


STAND_IN = {
    "srun": """
printf "%s\\0" "$@" >"$DUMP"
env -0 >"$DUMP.env"
for last; do :; done
cp --preserve=mode -- "$last" "$DUMP.key"
exit "${SRUN_CODE:-0}\"""",
    "scontrol": """
case "$*" in
  "show hostnames"*) printf "node0\\nnode1\\n" ;;
  *) echo "NodeName=node0 NodeAddr=10.0.1.10 Weight=1" ;;
esac""",
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """An `srun` that only writes down its arguments, and a `scontrol` that knows two nodes."""
    folder = tmp_path_factory.mktemp("bin")
    for name, text in STAND_IN.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run_in_bash(text, stand_ins, folder):
    """The arguments that srun got, when bash read the script; and how bash ended."""
    dump = folder / "dump"
    dump.unlink(missing_ok=True)
    ran = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={
            "PATH": f"{stand_ins}:{os.environ['PATH']}",
            "DUMP": str(dump),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "LC_ALL": "C.UTF-8",
        },
        capture_output=True,
        timeout=300,
        check=False,
    )
    arguments = os.fsdecode(dump.read_bytes()).split("\0")[:-1] if dump.exists() else None
    return arguments, ran


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(job=nasty, setting=nasty, folder=names_of_files, option=nasty)
@example(job="$(touch pwned)", setting="'; touch pwned; '", folder="`touch pwned`", option="a\nb")
def test_whatever_is_in_a_word_reaches_the_agent_as_it_is(tmp_path, stand_ins, job, setting, folder, option):
    request = replace(
        PLAIN,
        train=("python", "train", f"/{job}", f"--set={setting}"),
        runs=tmp_path / "runs" / folder,
        srun_options=(f"--container-image={option}",),
    )
    if any(
        ord(letter) < 32 or letter in "\x7f\\" for letter in folder
    ):  # no #SBATCH line can say where its log is
        with pytest.raises(UsageError, match=r"control character|backslash"):
            script(request)
        return
    assume(len(os.fsencode(folder)) < 200)
    text = script(request)
    arguments, ran = run_in_bash(text, stand_ins, tmp_path)
    run = str(request.runs / "cats-17")
    assert ran.returncode == 0, ran.stderr
    assert arguments == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--label"),
        *("--kill-on-bad-exit=0", "--wait=120", f"--container-image={option}"),
        *("sh", "-c", 'exec "$@" --node-rank "$SLURM_NODEID"', "agent"),
        *("python", "train", f"/{job}", f"--set={setting}"),
        *("--nodes", "2", "--leader", "10.0.1.10:20017", "--run-dir", run),
        *("--team-key", f"{run}/team.key"),
    ]
    assert Path(run).is_dir()
    assert not list(Path(run).iterdir()), "the key is gone with the job"
    assert not [path for path in tmp_path.rglob("pwned") if path.is_file()]


def test_the_teams_key_is_a_file_of_this_user_alone_and_in_no_argument_or_variable(tmp_path, stand_ins):
    keys = []
    for _ in range(2):
        arguments, ran = run_in_bash(script(replace(PLAIN, runs=tmp_path / "runs")), stand_ins, tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert arguments[-2] == "--team-key"
        kept = tmp_path / "dump.key"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        read_key_file(kept)
        keys.append(kept.read_text())
        variables = (tmp_path / "dump.env").read_text()
        for shown in (*arguments, variables, ran.stdout.decode(), ran.stderr.decode()):
            assert keys[-1].split("\n")[0].strip() not in shown
        kept.unlink()
    assert keys[0] != keys[1], "another for each attempt"


@given(nasty, st.sampled_from(["account", "partition", "option"]))
def test_a_line_of_sbatch_options_stays_one_line(value, where):
    request = replace(
        PLAIN, **({"options": (f"--mail-user={value}",)} if where == "option" else {where: value})
    )
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        with pytest.raises(UsageError, match="control character"):
            script(request)
        return
    # Not str.splitlines, which also breaks at signs that neither sbatch nor a shell takes for an end of line.
    before, after = script(PLAIN).split("\n"), script(request).split("\n")
    (added,) = [line for line in after if line not in before]
    assert added.startswith(f"#SBATCH --{'mail-user' if where == 'option' else where}=")
    assert len(after) == len(before) + 1


@pytest.mark.parametrize("name", ["a b", "$(id)", "a\nb", "-x", "../x", "", "x/y", "ü"])
def test_a_job_name_that_is_no_name_is_refused(name):
    with pytest.raises(UsageError, match="the job's name"):
        replace(PLAIN, name=name)


def test_a_log_folder_that_slurm_would_write_elsewhere_is_refused():
    with pytest.raises(UsageError, match="backslash"):
        script(replace(PLAIN, run=Path("/shared/a\\b")))
    assert file_pattern("x", "/a%j") == "/a%%j"


def test_a_zero_byte_is_refused():
    with pytest.raises(UsageError, match="zero byte"):
        shell_word("a\0b")
    assert shell_word(f"a b{variable('run')}/c d") == "'a b'\"$run\"'/c d'"
    assert shell_word("") == "''"
    assert sbatch_word("x", 'a "b" \\') == '"a \\"b\\" \\\\"'


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--nodes=4", "cluster.nodes"),
        ("--nod=4", "cluster.nodes"),
        ("-N4", "cluster.nodes"),
        ("-o/tmp/x", "--run-dir"),
        ("--signal=TERM", "slurm.signal_seconds"),
        ("--array=0-3", "one job"),
        ("--wrap=id", "the script is the job"),
        ("constraint=g5", "no option of sbatch"),
        ("--constraint g5", "put = between"),
        ("", "no option of sbatch"),
    ],
)
def test_an_option_that_would_break_the_script_is_refused_with_what_to_use(option, words):
    with pytest.raises(UsageError, match=words):
        _check_option(option)


def test_other_options_of_sbatch_are_taken():
    for option in (
        "--constraint=g5",
        "--exclusive",
        "-x",
        "--nodelist=a,b",
        "--mem=0",
        "--qos=high",
        "--gpu-bind=none",
    ):
        _check_option(option)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("UNLIMITED", None)],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(time, seconds):
    assert _seconds(time) == seconds

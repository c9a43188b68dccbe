"""Every command, given what no one should give it: one line, an exit code that is documented, and soon."""

import json
import os
import random
import signal
import sys

import pytest

from dure import cli
from dure.base.errors import DureError, JobError
from dure.config import Job, LoadedJob, load_job, parse_settings
from dure.config.limits import LARGEST_SEED

GOOD = """
name = "good"
[model]
factory = "m.py:model"
[data]
factory = "pkg.mod:data"
global_batch = 8
[train]
epochs = 1
"""
ODD_WORDS = [
    *(
        "",
        " ",
        "-1",
        "0",
        "1e999",
        "nan",
        "99999999999999999999",
        "9" * 5000,
        "x" * 5000,
        "🙂",
        "a\nb",
        "\x1b[2J",
        "..",
        "/",
    ),
    *(
        "2:1",
        ":",
        "1:2:3",
        "s3://",
        "s3://a:b@c/d",
        "s3://bucket/../..",
        "http://a:b@c",
        "\udcff",
        "{storage}",
        "%s{0}",
        "\0",
    ),
]


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory):
    """Paths that lead to anything but what is asked for."""
    folder = tmp_path_factory.mktemp("odd")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "endless").touch()
    os.truncate(folder / "endless", 1 << 40)
    (folder / "zero").symlink_to("/dev/zero")
    contents = {
        "empty": b"",
        "binary": random.Random(1).randbytes(5000),
        "not-utf8.toml": b'name = "\xff"\n',
        "nested.toml": b"a = " + b"[" * 20_000 + b"]" * 20_000,
        "inline.toml": b"a = " + b"{a=" * 5000 + b"1" + b"}" * 5000,
        "dotted.toml": b"[" + b".".join([b"a"] * 5000) + b"]\nb = 1\n",
        "args.toml": GOOD.encode() + b"[model.args]\n" + b".".join([b"a"] * 500) + b" = 1\n",
        "digits.toml": b"a = " + b"9" * 9999,
        "nul.toml": GOOD.encode() + b'[eval]\nfactory = "a\\u0000b:c"\n',
        "wrong.toml": b"model = 3\ndata = []\ntrain = 'x'\n",
        "good.toml": GOOD.encode(),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    odd_name = os.fsencode(folder) + b"/\xff\xfe.toml"
    with open(odd_name, "wb") as file:
        file.write(GOOD.encode())
    run = folder / "run"
    run.mkdir()
    for name in ("job.json", "summary.json", "submit.json"):
        (run / name).write_bytes(b"[" * 50_000)
    half = folder / "half"
    half.mkdir()
    (half / "job.json").write_text('{"job": {}, "folder": 3, "sources": []}')
    return [str(path) for path in folder.iterdir()] + [str(folder / "nowhere"), str(folder / ("a" * 300))]


class Hangs(BaseException):
    """So late that nothing else can be meant."""


def give_up(number, frame):
    raise Hangs


def run_command(monkeypatch, capfd, *words):
    """The exit code and what was said; whatever is raised instead is the command's fault."""
    monkeypatch.setattr(sys, "argv", ["dure", *words])
    before, streams = signal.signal(signal.SIGALRM, give_up), (sys.stdout, sys.stderr)
    signal.alarm(240)
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        raise AssertionError(f"dure {words!r}: {type(error).__name__}: {str(error)[:300]}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        sys.stdout, sys.stderr = streams
    said = capfd.readouterr()
    assert code in (0, 1, 2, 4), (words, code, said)
    assert "Traceback" not in said.err
    return code, said


COMMANDS = {
    "train": ["train", "{}", "--print-config"],
    "train --set": ["train", "{good}", "--print-config", "--set", "{}"],
    "train --set train.lr": ["train", "{good}", "--print-config", "--set", "train.lr={}"],
    "train --ranks": ["train", "{good}", "--print-config", "--ranks", "{}"],
    "train --nodes": ["train", "{good}", "--print-config", "--nodes", "{}"],
    "train --hosts": ["train", "{good}", "--print-config", "--hosts", "{}"],
    "train --rescue-dir": ["train", "{good}", "--print-config", "--rescue-dir", "{}"],
    "train --leader": ["train", "{good}", "--nodes", "2", "--node-rank", "7", "--leader", "{}"],
    "train --lang": ["train", "{nowhere}", "--lang", "{}"],
    "checkpoints": ["checkpoints", "{}"],
    "checkpoints --json": ["checkpoints", "{}", "--json"],
    "export": ["export", "{}", "{nowhere}"],
    "export --step": ["export", "{nowhere}", "out", "--step", "{}"],
    "submit": ["submit", "{}", "--dry-run"],
    "submit --ranks": ["submit", "{good}", "--dry-run", "--ranks", "{}"],
    "submit --set": ["submit", "{good}", "--dry-run", "--set", "slurm.time={}"],
    "status": ["status", "{}"],
    "cancel": ["cancel", "{}"],
    "run": ["run", "{}", "--ranks", "0"],
    "run --ranks": ["run", "{nowhere}", "--ranks", "{}"],
    "run --leader": ["run", "{good}", "--nodes", "2", "--node-rank", "9", "--leader", "{}"],
    "doctor": ["doctor", "{}", "--set", "cluster.nodes=0"],
    "doctor --set": ["doctor", "{wrong}", "--set", "{}"],
    "drill": ["drill", "{}", "--faults", "none"],
    "drill --faults": ["drill", "{good}", "--faults", "{}", "--run-dir", "{empty}"],
    "image inspect": ["image", "inspect", "{}"],
    "image digest": ["image", "digest", "{}"],
    "image run": ["image", "run", "{}", "--", "true"],
    "image run --mount": ["image", "run", "{nowhere}", "--mount", "{}", "--", "true"],
    "lab status": ["lab", "status", "--name", "{}"],
    "lab exec": ["lab", "exec", "{}", "--name", "no-such-lab", "--", "true"],
    "lab cut": ["lab", "cut", "{}", "--name", "no-such-lab"],
    "bench step": ["bench", "step", "--ranks", "{}", "--rounds", "0"],
    "bench reduce": ["bench", "reduce", "--mib", "{}", "--ranks", "0"],
    "no command": ["{}"],
}


def answers(name, odd_files, odds, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    known = {os.path.basename(path).split(".")[0]: path for path in odd_files}
    named = {f"{{{word}}}": known[word] for word in ("good", "wrong", "nowhere", "empty")}
    for odd in odds:
        words = [named.get(word, word.replace("{}", odd)) for word in COMMANDS[name]]
        run_command(monkeypatch, capfd, *words)
    if COMMANDS[name][0] != "run":  # which makes its folder before it looks at the script
        assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_an_odd_argument_in_one_line(name, odd_files, monkeypatch, capfd, tmp_path):
    dice = random.Random(name)
    odds = [*dice.sample(ODD_WORDS, 3), *dice.sample(odd_files, 3)]
    if COMMANDS[name][1:2] == ["{}"]:
        odds += [path for path in odd_files if path.endswith(("pipe", "zero", "endless", "nested.toml"))]
    answers(name, odd_files, odds, monkeypatch, capfd, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_every_odd_argument_in_one_line(name, odd_files, monkeypatch, capfd, tmp_path):
    answers(name, odd_files, [*ODD_WORDS, *odd_files], monkeypatch, capfd, tmp_path)


ODD_VALUES = [
    *(
        None,
        True,
        -1,
        0,
        1,
        7,
        10**8,
        2**31,
        2**53 + 1,
        2**63,
        2**64,
        10**30,
        0.5,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *(
        "",
        "x",
        "auto",
        "a:b",
        "a\0b:c",
        "../../x.py:y",
        "x" * 3000,
        "\x1b[2J",
        "🙂",
        [],
        [1],
        ["a", "b"],
        {},
        {"a": 1},
        [[[]]],
    ),
    *([{"match": "x"}], [{"match": 1, "args": 2, "more": 3}], [{"source": "a", "target": 3}]),
]


def test_3_000_odd_jobs_are_loaded_or_refused_in_one_line(tmp_path):
    dice = random.Random(5)
    fields = [
        f"{name}.{inner}" if hasattr(field.annotation, "model_fields") else name
        for name, field in Job.model_fields.items()
        for inner in (getattr(field.annotation, "model_fields", None) or {name: None})
    ]
    (tmp_path / "job.toml").write_text(GOOD)
    loaded = 0
    for _ in range(3000):
        settings = {}
        for _ in range(dice.randrange(1, 4)):
            key = (
                dice.choice(fields)
                if dice.random() < 0.9
                else dice.choice(["", ".", "a.b.c", "model", "train.x"])
            )
            value = dice.choice(ODD_VALUES)
            settings[key] = value if isinstance(value, str) else json.dumps(value).replace("null", '""')
        try:
            found = load_job(tmp_path / "job.toml", settings)
        except JobError as error:
            refusal = str(error)
        else:
            loaded, refusal = loaded + 1, ""
            assert LoadedJob.from_json(found.to_json()) == found
        assert refusal.isprintable(), refusal
        assert len(refusal) < 2000
    assert loaded > 100


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("team.shards=100000000", "team.shards is 100000000: input should be less than or equal to 65536"),
        ("team.threads=100000", "team.threads is 100000: input should be less than or equal to 1024"),
        (f"train.seed={LARGEST_SEED + 1}", "train.seed is 9223372036854775808"),
        (f"train.seed={'9' * 9000}", "train.seed is '999"),
        ("team.ranks=20000", "team.ranks is 20000: input should be less than or equal to 1024"),
        ("team.hang_seconds=inf", "team.hang_seconds is inf"),
        ("model.args=" + "[" * 5000 + "]" * 5000, "model.args: its value is nested too deeply"),
        ("model.args." + "a." * 400 + "a=1", "nested more than 32 levels deep"),
    ],
)
def test_numbers_that_nothing_could_bear_are_refused_at_once(setting, words, tmp_path):
    (tmp_path / "job.toml").write_text(GOOD)
    with pytest.raises(DureError) as caught:
        load_job(tmp_path / "job.toml", parse_settings([setting]))
    assert words in str(caught.value)


def test_a_run_of_somebody_elses_making_is_listed_or_refused(tmp_path):
    for number, text in enumerate(
        [
            "",
            "{}",
            "[]",
            "3",
            '{"job": 3}',
            '{"job": {}, "folder": 3, "sources": 4}',
            "[" * 99_999,
            '{"a":' * 9_999,
        ]
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            LoadedJob.from_json(text)
        run = tmp_path / str(number)
        run.mkdir()
        (run / "job.json").write_text(text)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody who may not write")
def test_the_demo_in_a_folder_that_cannot_be_written_is_refused_in_one_line(monkeypatch, capfd, tmp_path):
    (tmp_path / "file").touch()
    for place in ("/proc/nowhere", str(tmp_path / "file" / "inside"), "/sys"):
        code, said = run_command(monkeypatch, capfd, "demo", "--storage", place)
        assert code == 2
        assert len(said.err.splitlines()) <= 2
        assert "give another folder: --storage DIR" in said.err

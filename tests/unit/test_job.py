"""A job file is checked once, in words that help."""

import pytest

from dure.base.errors import JobError
from dure.config import LoadedJob, all_values, load_job

GOOD = """
name = "good"
[model]
factory = "m.py:model"
[data]
factory = "pkg.mod:data"
args = { folder = "{storage}/x" }
global_batch = 8
[train]
epochs = 1
"""


@pytest.fixture
def job(tmp_path):
    def write(text=GOOD, **settings):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return load_job(path, {key.replace("__", "."): value for key, value in settings.items()})

    return write


def refused(job, *words, text=GOOD, **settings):
    with pytest.raises(JobError) as caught:
        job(text, **settings)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_defaults_are_constants(job):
    team = job().job.team
    assert (team.shards, team.threads) == (8, 1)


def test_a_setting_beats_the_file_and_every_value_has_its_source(job):
    loaded = job(train__lr="0.01", data__global_batch="16", model__args__width="4")
    assert loaded.job.train.lr == 0.01
    assert loaded.job.model.args == {"width": 4}
    sources = {key: (value, source) for key, value, source in all_values(loaded)}
    assert sources["train.lr"] == (0.01, "--set train.lr=0.01")
    assert sources["data.global_batch"] == (16, "--set data.global_batch=16")
    assert sources["train.epochs"] == (1, "job.toml")
    assert sources["team.shards"] == (8, "default")
    assert sources["model.args"][1] == "--set model.args.width=4"


def test_an_option_of_its_own_is_the_source_it_names(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(GOOD)
    values = {key: (value, source) for key, value, source in all_values(load_job(path, {}, 4))}
    assert values["team.ranks"] == (4, "--ranks 4")


def test_a_span_of_ranks_names_the_least_and_the_most(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(GOOD)
    team = load_job(path, {}, "2:8").job.team
    assert (team.min_ranks, team.ranks) == (2, 8)
    team = load_job(path, {"team.min_ranks": "3"}, "2").job.team
    assert (team.min_ranks, team.ranks) == (None, 2)
    with pytest.raises(JobError, match="turn them round"):
        load_job(path, {}, "8:2")
    for wrong in ("two", "2:", ":8", "2:4:8", ""):
        with pytest.raises(JobError, match=r"such as 8, or .* such as 2:8"):
            load_job(path, {}, wrong)


def test_the_ranks_read_what_the_launcher_wrote(job):
    loaded = job()
    assert LoadedJob.from_json(loaded.to_json()) == loaded
    assert loaded.arguments(loaded.job.data.args) == {"folder": f"{loaded.storage}/x"}


def test_an_unknown_key_is_refused_with_the_nearest_name(job):
    refused(
        job,
        "unknown key data.gobal_batch",
        "data.global_batch",
        text=GOOD + "\n[data.x]\n",
        data__gobal_batch="3",
    )
    refused(job, "unknown key train.optimiser", "train.optimizer", train__optimiser='"SGD"')
    refused(job, "unknown key trian", "train", trian__lr="1")


def test_a_wrong_type_is_named_with_its_value(job):
    refused(job, "data.global_batch", "'many'", data__global_batch="'many'")


def test_a_batch_of_nothing_is_refused(job):
    refused(job, "data.global_batch is 0", data__global_batch="0")


def test_more_ranks_than_shards_are_refused_with_the_way_out(job):
    refused(job, "team.ranks is 9", "8 shards", "team.shards", team__ranks="9")


def test_epochs_or_steps_must_be_given_and_not_both(job):
    refused(job, "both are given", train__steps="5")
    refused(job, "neither is given", text=GOOD.replace("epochs = 1", ""))


def test_the_learning_rate_has_one_home(job):
    refused(job, "train.lr", train__optimizer_args="{ lr = 1.0 }")


def test_broken_toml_and_missing_files_are_told(job, tmp_path):
    refused(job, "not valid TOML", "line 2", text="[model]\nfactory = = 1\n")
    with pytest.raises(JobError, match="no job file"):
        load_job(tmp_path / "nowhere.toml")


def test_a_name_cannot_leave_its_folder(job):
    refused(job, "name", text=GOOD.replace('"good"', '"../../etc"'))


def test_a_model_needs_a_factory_or_a_folder_that_says_what_to_build(tmp_path):
    path = tmp_path / "job.toml"
    rest = '[data]\nfactory = "net.py:data"\nglobal_batch = 4\n[train]\nsteps = 1\n'
    path.write_text(f"[model]\n{rest}")
    with pytest.raises(JobError, match=r"model\.factory is missing; give one, or model\.weights"):
        load_job(path)
    path.write_text(f'storage = "s3://bucket/job"\n[model]\nweights = "models/minilm"\n{rest}')
    loaded = load_job(path)
    assert (loaded.job.model.load, loaded.job.model.strict, loaded.storage) == (
        "slices",
        True,
        "s3://bucket/job",
    )
    path.write_text(f'[model]\nweights = "models/minilm"\nload = "everyone"\n{rest}')
    with pytest.raises(JobError, match=r"model\.load is 'everyone'"):
        load_job(path)

"""What a job names besides its model and data is checked before the first step."""

import math

import pytest
import torch
from support import own_job

from dure.base.errors import JobError, ModelRefused
from dure.config import load_job
from dure.step.gathered import auroc, confusion, f1
from dure.step.update import checked_optimizer, checked_schedule, make_schedule
from dure.train.progress import Progress


def loaded(folder, **settings):
    return load_job(
        own_job.job(folder), {key.replace("__", "."): value for key, value in settings.items()}
    ).job


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval__stop_on": "f2"}, "eval.stop_on is 'f2', which is no metric; there are loss, accuracy"),
        ({"eval__stop_on": "loss"}, "eval.stop_on needs evaluations to look at"),
        ({"log__to": '["excel"]'}, "log.to.0 is 'excel'"),
        ({"hooks": "mine.py"}, "hooks is 'mine.py'"),
        (
            {"train__optimizer": "a.py:b", "train__groups": '[{match = "*", args = {}}]'},
            "train.groups are for optimizers of torch, and a.py:b makes its own",
        ),
    ],
)
def test_a_job_that_cannot_be_meant_is_refused(tmp_path, settings, words):
    with pytest.raises(JobError, match=words.replace("(", r"\(")):
        loaded(tmp_path, **settings)


@pytest.mark.parametrize(
    ("schedule", "args", "words"),
    [
        ("SequentialLR", "{milestones = [2]}", "write a list of tables"),
        ("SequentialLR", '{milestones = [], schedulers = [{name = "StepLR", step_size = 2}, {name = "StepLR", '
         "step_size = 1}]}", "do not fit SequentialLR"),
        ("ChainedScheduler", '{schedulers = [{name = "LinearLr"}]}', "'LinearLr' is not there"),
        ("ChainedScheduler", '{schedulers = [{name = "ReduceLROnPlateau"}]}', "is refused"),
        ("SequentialLR", '{schedulers = [{name = "ChainedScheduler"}]}', "torch cannot put one into the other"),
    ],
)  # fmt: skip
def test_a_schedule_made_of_schedules_is_checked(tmp_path, schedule, args, words):
    job = loaded(tmp_path, train__schedule=schedule, train__schedule_args=args)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(JobError, match=words):
        make_schedule(job.train, optimizer)


def test_a_warm_up_and_what_follows_it_have_torchs_own_learning_rates(tmp_path):
    job = load_job(own_job.job(tmp_path), own_job.WARM_UP).job
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = make_schedule(job.train, optimizer)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0, 1.0, 0.1, 0.1, 0.01])


def test_what_factories_return_is_checked():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    good = torch.optim.SGD(model.parameters(), lr=1.0)
    assert checked_optimizer(good, "a:b", model) is good
    for made, words in (
        (None, "returned a NoneType"),
        (torch.optim.SGD(other.parameters(), lr=1.0), "that is not the model's"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS is refused"),
    ):
        with pytest.raises(JobError, match=words):
            checked_optimizer(made, "a:b", model)
    with pytest.raises(JobError, match="without state_dict, load_state_dict"):
        checked_schedule(type("Own", (), {"step": lambda self: None})(), "a:b")
    with pytest.raises(JobError, match="ReduceLROnPlateau is refused"):
        checked_schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(good), "a:b")


def test_a_run_ends_after_so_many_evaluations_in_a_row_that_are_not_better():
    at = Progress()
    values = [3.0, 2.0, math.nan, 2.5, 1.0, 1.0, 1.5, 0.9]
    assert [at.judge(value, after=3, less_is_better=True) for value in values] == [False] * 8
    assert at.judge(0.9, after=3, less_is_better=True) is False
    later = Progress()
    later.go_on_from({"step": 4, **at.to_facts()})
    assert [later.judge(v, after=3, less_is_better=True) for v in (1.0, math.nan)] == [False, True]
    more = Progress()
    assert [more.judge(v, after=1, less_is_better=False) for v in (0.5, 0.6, 0.6)] == [False, False, True]


def test_f1_auroc_and_the_confusion_matrix_by_hand():
    scores = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 2.0], [5.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 0, 1, 1])
    assert confusion(scores, labels).tolist() == [[1, 1], [1, 2]]
    assert f1(scores, labels) == pytest.approx(4 / 6)
    # Margins of class 1: 3, -5, 1; of class 0: -1, 1. Won: 2 of 2, 0, 1 and a tie.
    assert auroc(scores, labels) == pytest.approx((2 + 0 + 1.5) / 6)
    assert auroc(scores[:, 1] - scores[:, 0], labels) == auroc(scores, labels)
    assert math.isnan(auroc(scores, torch.zeros(5)))
    three = torch.eye(3)[torch.tensor([0, 1, 2, 2])]
    assert f1(three, torch.tensor([0, 1, 2, 1])) == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    with pytest.raises(ModelRefused, match="the target of sample 3 is 7, of 3 classes"):
        confusion(three, torch.tensor([0, 1, 2, 7]))

"""A password is never told: not the one in an endpoint's address or another URL, not the value of a secret variable."""

import pytest

from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.base.say import redacted, say
from dure.launch.failure import describe
from dure.observe import events
from dure.observe.display import Display
from dure.storage import open_store

SECRET = "hunter2-much-longer"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://user:{SECRET}@host:9000/x", "http://***@host:9000/x"),
        (
            f"no answer from https://user:p@ss{SECRET}@host; is it running?",
            "no answer from https://***@host; is it running?",
        ),
        (f"s3://AKIA:{SECRET}@bucket/prefix: not a bucket", "s3://***@bucket/prefix: not a bucket"),
        (f"GET https://h/x?a=1&X-Amz-Signature={SECRET}&b=2", "GET https://h/x?a=1&X-Amz-Signature=***&b=2"),
        (f"https://h/x?X-Amz-Security-Token={SECRET}", "https://h/x?X-Amz-Security-Token=***"),
        (f'("http://u:{SECRET}@h")', '("http://***@h")'),
        ("mail a@b.c, http://host/a@b stays", "mail a@b.c, http://host/a@b stays"),
    ],
)
def test_addresses_are_told_without_their_passwords(text, shown):
    assert redacted(text) == shown


def test_the_value_of_a_secret_variable_is_not_told_wherever_it_turns_up(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("SOME_TOKEN", "short")
    say(f"the server says {SECRET} is wrong, in short")
    told = capsys.readouterr().err
    assert told == "dure: the server says *** is wrong, in short\n"
    folder = RunFolder(tmp_path)
    folder.create()
    display = Display(folder, 1, "en")
    display.tell(f"told: {SECRET}")
    recorder = events.Recorder(folder.events(0))
    recorder.record(events.Noted(f"noted: {SECRET} http://a:{SECRET}@b"))
    recorder.close(60)
    display.tick()
    display.close()
    told = capsys.readouterr().err
    assert SECRET not in told
    assert "noted: ***" in told
    try:
        raise ValueError(f"cannot log in with {SECRET}")
    except ValueError as error:
        words = describe(error, 0)
    assert SECRET not in words.message + words.details


def test_a_password_in_the_endpoint_is_not_told_when_the_server_does_not_answer(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not this either")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:9")
    with pytest.raises(DureError) as caught:
        open_store("s3://bucket/prefix").names("")
    assert SECRET not in str(caught.value)
    assert "127.0.0.1:9" in str(caught.value)

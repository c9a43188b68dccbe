"""The team's key: a file for its owner's eyes, or a word that can be typed; nowhere to be seen."""

import contextlib
import os
import pty
import re
import stat
import subprocess
import sys

import pytest

from dure.base.errors import UsageError
from dure.base.team_key import TeamKey, make_key_file, new_word, read_key_file
from dure.comm.link_secret import offered, read_link_secret
from dure.comm.topology import LINK_SECRET_VARIABLE
from dure.launch.nodes import key_by_hand as by_hand
from dure.launch.nodes.key_by_hand import key_by_hand, key_file, wait_for_key_file


def put(path, text="correct horse battery", mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_does_not_show_itself():
    key = TeamKey.random()
    for shown in (repr(key), str(key), f"{key}"):
        assert key.hex() not in shown
        assert str(key.secret) not in shown
    assert TeamKey.from_hex(key.hex()) == key


def test_what_is_derived_for_one_purpose_is_not_that_of_another():
    key = TeamKey.random()
    assert len({key.derived("agents"), key.derived("data links"), key.secret}) == 3
    assert key.derived("agents") == TeamKey(key.secret).derived("agents")


def test_a_word_is_typed_in_any_case_with_or_without_dashes():
    word = new_word()
    assert len(word) == 14
    typed = {
        word,
        word.upper(),
        word.replace("-", ""),
        f" {word}\n",
        word.replace("0", "o").replace("1", "L"),
    }
    assert len({TeamKey.from_text(text) for text in typed}) == 1
    assert new_word() != word
    assert TeamKey.from_text(new_word()) != TeamKey.from_text(word)


def test_a_file_is_made_for_its_owner_alone_and_read_again(tmp_path):
    before = os.umask(0)
    try:
        make_key_file(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert read_key_file(tmp_path / "key") == read_key_file(tmp_path / "key")
    assert os.listdir(tmp_path) == ["key"]
    make_key_file(tmp_path / "other")
    assert read_key_file(tmp_path / "other") != read_key_file(tmp_path / "key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602, 0o601])
def test_a_file_that_others_can_open_is_refused_with_the_way_out(tmp_path, mode):
    path = put(tmp_path / "key", mode=mode)
    with pytest.raises(UsageError, match=rf"mode {mode:04o}.*chmod 600"):
        read_key_file(path)


def test_a_file_of_somebody_else_is_refused(tmp_path, monkeypatch):
    path = put(tmp_path / "key")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to user"):
        read_key_file(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, "\n\n\n            \n"])
def test_a_file_without_a_key_in_it_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="characters"):
        read_key_file(put(tmp_path / "key", text))


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(UsageError, match="no regular file"):
            read_key_file(path)
    with pytest.raises(UsageError, match="No such file"):
        read_key_file(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot make"):
        make_key_file(tmp_path / "no" / "folder")


def test_the_leader_makes_the_file_and_the_others_wait_for_it(tmp_path):
    path, said = tmp_path / "key", []
    with pytest.raises(UsageError, match=r"is not there after 0 s"):
        wait_for_key_file(path, leads=False, seconds=0.0, say=said.append)
    options = {"nodes": 2, "seconds": 1.0, "say": said.append}
    key = key_by_hand(path, leads=True, **options)
    assert key_by_hand(path, leads=False, **options) == key
    assert key_by_hand(path, leads=True, **options) == key, "a file that is there is kept"
    assert said == []


def test_the_environment_names_the_file_where_no_option_does(tmp_path):
    environ = {by_hand.KEY_FILE_VARIABLE: str(tmp_path / "key")}
    assert key_file(None, environ) == tmp_path / "key"
    assert key_file(tmp_path / "other", environ) == tmp_path / "other"
    assert key_file(None, {}) is None


@pytest.mark.parametrize("leads", [True, False])
def test_without_a_file_and_a_terminal_nothing_starts_unauthenticated(leads, monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(UsageError, match="--team-key FILE"):
            key_by_hand(None, leads=leads, nodes=2, seconds=0.0, say=print)


CHILD = """
import sys
from dure.launch.nodes.key_by_hand import key_by_hand
from dure.base.say import say
print(key_by_hand(None, leads=sys.argv[1] == "leads", nodes=2, seconds=0.0, say=say).hex(), flush=True)
"""


def in_a_terminal(role, typed=b""):
    """What a process with a terminal prints there, and the key that it comes to."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", CHILD, role]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    ) as child:
        os.close(theirs)
        shown = b""
        if typed:
            while b"printed: " not in shown:
                shown += os.read(ours, 1000)
            os.write(ours, typed + b"\n")
        key = child.stdout.read().strip()
        with contextlib.suppress(OSError):  # the terminal ends with the process
            while more := os.read(ours, 1000):
                shown += more
    os.close(ours)
    return shown.decode(), key


def test_in_a_terminal_the_leader_prints_a_word_and_the_others_ask_for_it():
    shown, key = in_a_terminal("leads")
    word = re.search(r"the key of this run is ([0-9a-z-]{14}): type it", shown)[1]
    asked, typed = in_a_terminal("follows", word.upper().encode())
    assert typed == key
    assert word.upper() not in asked, "it is not shown where it is typed"


def test_a_run_on_one_node_needs_no_key_from_anybody():
    assert key_by_hand(None, leads=True, nodes=1, seconds=0.0, say=print) != key_by_hand(
        None, leads=True, nodes=1, seconds=0.0, say=print
    )


def test_ranks_find_the_secret_through_the_environment_which_does_not_hold_it():
    secret = TeamKey.random().derived("data links")
    with offered(secret) as variables:
        assert list(variables) == [LINK_SECRET_VARIABLE]
        assert secret.hex() not in str(variables)
        assert read_link_secret(variables) == secret
    assert read_link_secret(variables) == b""


@pytest.mark.parametrize("value", ["", "1", "a:b", "1:2:3", "../../etc/passwd:0", "99999999:3"])
def test_a_variable_that_names_no_secret_gives_none(value):
    assert read_link_secret({LINK_SECRET_VARIABLE: value}) == b""

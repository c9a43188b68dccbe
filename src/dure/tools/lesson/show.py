"""`dure lesson`: serve it, or write it as one file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import write_whole
from dure.base.language import Language
from dure.base.say import say
from dure.page.serve import bind, open_browser, refuse_without_extra, run_server
from dure.tools.lesson.one_file import in_one_file
from dure.tools.lesson.running import Lab


def write_file(out: Path, language: Language) -> None:
    """The lesson as one file that needs neither a server nor a network."""
    try:
        write_whole(out, in_one_file(language))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; give another path") from None


def serve_lesson(host: str, port: int | None, language: Language, *, opens: bool, as_json: bool) -> None:
    """Serve the lesson until the process is asked to end; what its experiments started ends with it."""
    refuse_without_extra()
    from dure.tools.lesson.server import application

    lab = Lab()
    listener, address = bind(host, port)
    if as_json:
        print(json.dumps({"url": address.url, "port": address.port, "tunnel": address.tunnel}), flush=True)
    else:
        print(f"{'수업' if language == 'ko' else 'the lesson'}: {address.url}", flush=True)
        say("Ctrl-C ends it")
        if address.tunnel is not None:
            say(f"from your own machine: {address.tunnel}")
    if opens:
        open_browser(address)
    with contextlib.closing(lab):
        run_server(listener, application(lab, language, address.host, address.token))

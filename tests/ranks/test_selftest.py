"""`dure selftest`: all of it on the CPU, once; its report and its object."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dure.tools.selftest.report import text_of
from dure.tools.selftest.result import Check, Report
from dure.tools.selftest.run import machine_words

DOCS = Path(__file__).parents[2] / "docs"
TYPES = {"object": dict, "array": list, "string": str, "number": (int, float)}


def refuse_other_shape(value, schema, at="it"):
    """The part of JSON Schema that the documentation uses."""
    assert not ("const" in schema and value != schema["const"]), at
    assert not ("enum" in schema and value not in schema["enum"]), at
    assert isinstance(value, TYPES[schema["type"]]) if "type" in schema else True, at
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        assert set(schema.get("required", ())) <= set(value), at
        assert schema.get("additionalProperties", True) or set(value) <= set(properties), at
        for name, inner in properties.items():
            refuse_other_shape(value[name], inner, f"{at}.{name}")
    for number, one in enumerate(value if isinstance(value, list) else ()):
        refuse_other_shape(one, schema.get("items", {}), f"{at}[{number}]")


@pytest.fixture(scope="module")
def told():
    """What the command says on two ranks."""
    ran = subprocess.run(
        [sys.executable, "-m", "dure", "selftest", "--ranks", "2", "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def test_all_that_the_cpu_can_show_is_right(told):
    verdicts = {check["name"]: check["verdict"] for check in told["checks"]}
    assert told["verdict"] == "pass"
    assert [name for name in verdicts if verdicts[name] != "pass" and name != "overlap"] == [
        "sanitizer_default_stream",
        "sanitizer_own_stream",
        "host_waits",
    ]
    assert all(check["why"] for check in told["checks"] if check["verdict"] == "skipped")
    same = next(check["figures"] for check in told["checks"] if check["name"] == "same_bits")
    assert same["ranks"] == [1, 2]
    assert [len(hashes) for hashes in same["weights_sha256"].values()] == [1, 1, 1]


@pytest.mark.parametrize("page", ["selftest.md", "selftest.ko.md"])
def test_the_object_is_as_documented(told, page):
    (schema,) = re.findall(r"```json\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    refuse_other_shape(told, json.loads(schema))
    with pytest.raises((AssertionError, KeyError)):
        refuse_other_shape({**told, "checks": [{"name": 3}]}, json.loads(schema))


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_report_names_every_check_in_both_languages(told, language):
    checks = tuple(Check(**check) for check in told["checks"])
    text = text_of(Report(told["machine"], checks, told["seconds"]), language)
    assert text.count("✓") + text.count("·  ") + text.count("\n  · ") >= len(checks) - 1
    assert len(text.splitlines()) >= len(checks) + 3


def test_other_bits_are_a_failure():
    report = Report({**machine_words("cpu")}, (Check("same_bits", "fail", "other bits in cnn"),), 1.0)
    assert report.verdict == "fail"
    assert report.to_plain()["checks"][0]["why"] == "other bits in cnn"

"""The documentation says what the code says, and both languages say the same."""

import difflib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PAIRS = [(page, page.with_suffix(".ko.md")) for page in PAGES if page.with_suffix(".ko.md").exists()]


def tool(name):
    """A module of tools/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_rows():
    settings = tool("job_settings")
    return [row for prefix, section in settings.sections() for row in settings.rows(prefix, section)]


def parts(page):
    """A page's text outside of its code blocks, and the blocks."""
    pieces = re.split(r"^```.*\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "\n".join(pieces[::2]), pieces[1::2]


def heading_levels(page):
    return [len(marks) for marks in re.findall(r"^(#+) ", parts(page)[0], flags=re.MULTILINE)]


def commands(page):
    """What a reader types: lines after `$ `, and lines that are `dure` or `make` themselves, without their comments.

    The Korean page may ask for Korean output.
    """
    lines = [re.sub(r"\s+# .*", "", line) for block in parts(page)[1] for line in block.splitlines()]
    return [
        line.removesuffix(" --lang ko")
        for line in lines
        if line.startswith("$ ") or re.match(r"(\.venv/bin/)?(dure|make) ", line)
    ]


def anchors(page):
    """The names that GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", parts(page)[0], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_setting_is_in_the_english_page_with_its_default_and_sentence():
    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    missing = [key for key, default, words in all_rows() if f"| `{key}` | {default} | {words} |" not in text]
    assert missing == []


def test_every_setting_is_in_the_korean_page_with_its_default():
    text = (ROOT / "docs" / "job.ko.md").read_text(encoding="utf-8")
    korean = {"required": "필수", "none": "없음"}
    missing = [
        key for key, default, _ in all_rows() if f"| `{key}` | {korean.get(default, default)} | " not in text
    ]
    assert missing == []


@pytest.mark.parametrize("name", ["job.md", "job.ko.md"])
def test_no_page_names_a_setting_that_is_gone(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE)) == {
        key for key, _, _ in all_rows()
    }


def test_every_page_of_the_site_but_the_log_is_there_in_korean():
    english = {page.name for page in (ROOT / "docs").glob("*.md") if not page.name.endswith(".ko.md")}
    assert {page.name for page, _ in PAIRS} == (english - {"log.md"}) | {"README.md"}


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_a_newcomer_reads_a_readme_of_150_lines_at_most(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
@pytest.mark.parametrize(
    "file",
    ["data/shards.py", "comm/reduce/hook.py", "launch/nodes/membership.py", "config/sections.py"],
)
def test_a_newcomer_finds_the_file_from_the_readme(name, file):
    """How a sample gets to a rank, where gradients are added, a lost node, where a setting is defined."""
    assert f"](src/dure/{file})" in (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name
)
def test_no_page_uses_a_word_that_the_glossary_replaced(page):
    old = r"council|nursery|\bpulses?\b|맥박|\blitter\b|\boutbox\b|cluster(?:\.ko)?\.md"
    assert re.findall(old, page.read_text(encoding="utf-8"), flags=re.IGNORECASE) == []


def test_no_source_file_uses_a_word_that_the_glossary_replaced():
    old = r"\b(council|nursery|keepers?|births?|born|pulses?|meetings?|litter|lineage|outbox)\b"
    found = {
        str(path.relative_to(ROOT)): re.findall(old, path.read_text(encoding="utf-8"), flags=re.IGNORECASE)
        for path in sorted((ROOT / "src").rglob("*.py"))
    }
    assert {path: words for path, words in found.items() if words} == {}


def test_the_generated_pages_have_every_command_and_every_public_name():
    import typer

    import dure
    from dure.cli import app

    site = tool("docs_site")
    titles = re.findall(r"^#+ `dure ([\w ]+)`$", site.command_line(), flags=re.MULTILINE)
    assert {title.split()[0] for title in titles} == {
        name for name, command in typer.main.get_command(app).commands.items() if not command.hidden
    }
    names = re.findall(r"^::: [\w.]+\.(\w+)$", site.api(), flags=re.MULTILINE)
    assert set(names) == set(dure.__all__) - {"__version__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_source_files_in_the_text_exist(page):
    if page.name in ("CHANGELOG.md", "log.md"):
        return  # history
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|c))`", text)
    assert [
        path for path in paths if not any((ROOT / base / path).exists() for base in ("", "src", "src/dure"))
    ] == []


def code_shape(page):
    """The language of every code block: the same blocks in the same order."""
    return re.findall(
        r"^```(\w*)\n.*?^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def links(page):
    """Where a page leads, without the language, the anchor and the switch to the other language."""
    found = re.findall(r"\]\(([^)\s]+)\)", parts(page)[0])
    return sorted(re.sub(r"#.*", "", link).replace(".ko.", ".") for link in found)


@pytest.mark.parametrize(("english", "korean"), PAIRS, ids=lambda page: page.name)
def test_both_languages_have_the_same_sections(english, korean):
    assert heading_levels(english) == heading_levels(korean)


@pytest.mark.parametrize(("english", "korean"), PAIRS, ids=lambda page: page.name)
def test_both_languages_show_the_same_commands(english, korean):
    assert commands(english) == commands(korean)
    assert code_shape(english) == code_shape(korean)


@pytest.mark.parametrize(("english", "korean"), PAIRS, ids=lambda page: page.name)
def test_both_languages_lead_to_the_same_pages(english, korean):
    assert set(links(english)) == set(links(korean))


@pytest.mark.parametrize("name", ["docs/own-model.md", "docs/own-model.ko.md"])
def test_the_annotated_job_is_the_example(name):
    """Its keys and values, without the notes."""
    import tomllib

    jobs = [block for block in parts(ROOT / name)[1] if block.startswith('name = "cats"')]
    example = tomllib.loads((ROOT / "examples" / "cats.toml").read_text(encoding="utf-8"))
    assert [tomllib.loads(job) for job in jobs] == [example]


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_the_map_has_one_line_for_every_room(name):
    (block,) = (block for block in parts(ROOT / name)[1] if block.startswith("src/dure/"))
    named = {line.split()[0].rstrip("/") for line in block.splitlines()[1:]}
    package = ROOT / "src" / "dure"
    rooms = {path.name for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    assert named == rooms - {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", parts(page)[0]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("from-torchrun", "with_torchrun", "from_torchrun"),
        ("from-accelerate", "with_accelerate", "from_accelerate"),
        ("from-lightning", "with_fabric", "from_fabric"),
    ],
)
def test_a_page_about_moving_a_script_shows_the_difference_of_its_two_files(page, before, after):
    folder = ROOT / "examples" / "migrate"
    lines = [(folder / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in (before, after)]
    shown = "\n".join(difflib.unified_diff(*lines, f"{before}.py", f"{after}.py", lineterm="", n=1))
    for name in (f"{page}.md", f"{page}.ko.md"):
        assert f"```diff\n{shown}\n```" in (ROOT / "docs" / name).read_text(encoding="utf-8")

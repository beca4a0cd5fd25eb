"""Every code block of README and docs runs, and prints what the page says it prints."""

import pathlib
import re

import pytest
from helpers import pages

README_LINES = 90
# What the column of the site holds on a screen of 1280 pixels; messages (text) break at words there.
COLUMNS = 96
WORDS = 1500  # of prose, without programs and rows of tables: what a person reads to the end
NEEDS_DEVICES = re.compile(r"replicate_model\(|(?<!\w)MirroredStrategy\((?!\[\"CPU:0\"\]\))|check_parity\(")
NEEDS_JAX = re.compile(r"TPUStrategy\(|\bxla\b|contrib")


def _skip_without_jax(page):
    needs = any(block.language == "python" and NEEDS_JAX.search(block.text) for block in pages.blocks(page))
    if needs:
        pytest.importorskip("jax")


FIRST = re.compile(r"README|docs/(index|start|tutorials/(index|own_loop))")
"""The pages of a reader's first hour; the programs of others run in the full tier."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if FIRST.match(str(page)) else (pytest.mark.full("no page of the first hour"),))
        for page in pages.pages()
    ],
)
def test_the_blocks_of_a_page_run_and_print_what_it_says(page, tmp_path, monkeypatch, programs):
    _skip_without_jax(page)
    monkeypatch.chdir(tmp_path)
    pages.check(page, tmp_path, programs)


def test_the_programs_of_a_page_run_where_the_reader_has_one_device_and_no_jax_or_the_page_says_so():
    without_devices, without_a_word = [], []
    for page in pages.pages():
        blocks = [block.text for block in pages.blocks(page) if block.language == "python"]
        program = "\n".join(blocks)
        if NEEDS_DEVICES.search(program):
            first = next(line for line in blocks[0].splitlines() if "logical_devices(" in line or "Strategy(" in line)
            if "logical_devices(" not in first:
                without_devices.append(page)
        text = (pages.ROOT / page).read_text(encoding="utf-8")
        if NEEDS_JAX.search(program) and not re.search(r"\bjax\b|\[tensorflow,xla\]", text):
            without_a_word.append(page)
    assert not without_devices, "TensorFlow makes devices only before it starts"
    assert not without_a_word, "they need jax"


def test_programs_and_commands_fit_the_column_of_the_site():
    wide = [
        f"{page}:{block.line}"
        for page in pages.pages()
        for block in pages.blocks(page)
        if block.language != "text" and any(len(line) > COLUMNS for line in block.text.splitlines())
    ]
    assert not wide


def test_a_page_is_read_to_its_end():
    def words(page):
        text = re.sub(
            r"^( *)```.*?^\1```$", "", (pages.ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        prose = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
        return len(" ".join(prose).split())

    long = {page: count for page in pages.pages() if (count := words(page)) > WORDS}
    assert not long, "make two pages of each, which answer one question each"


def test_the_readme_is_short_and_has_its_two_commands():
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES
    commands = "\n".join(block.text for block in pages.blocks("README.md") if block.language == "sh")
    assert re.search(r"^make demo\b", commands, re.MULTILINE)
    assert re.search(r"^make test\b", commands, re.MULTILINE)


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?:: |- )((?!errors/)[\w/]+\.md)$", navigation, re.MULTILINE))
    there = {path.relative_to(pages.ROOT / "docs").as_posix() for path in (pages.ROOT / "docs").rglob("*.md")}
    assert listed == there


def test_links_between_files_lead_to_files_that_exist():
    """Those of the site are checked when it is built; these are what GitHub shows."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = re.sub(r"`[^`]*`", "", (pages.ROOT / name).read_text(encoding="utf-8"))
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", text):
            assert (pages.ROOT / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize(
    ("expected", "seen", "wrong"),
    [
        ("loss 0.501", "loss 0.5012", None),
        ("loss 0.501", "loss 0.6", "0.6 instead of 0.501"),
        ("2 replicas", "3 replicas", "the text differs"),
        ("2 replicas", "2.5 replicas", "the text differs"),
        ("1/10 ... 3/10", "1/10 2/10 3/10", None),
        ("1,000 rows in 3 ms", "1,000 rows in 3 ms", None),
        ("epoch 1 ... ms/step", "epoch 1 32/32 20ms/step 4 ms/step", None),
        ("(13, 1)", "(13, 1)", None),
        ("a\nb", "a b", None),
        ("a", "a b", "the text differs"),
    ],
)
def test_an_output_is_compared_number_by_number(expected, seen, wrong):
    assert pages.difference(expected, seen) == wrong


def test_a_block_that_fails_and_a_wrong_output_are_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = pathlib.Path("page.md")
    for text, word in (
        ("```python\n1 / 0\n```", r"page.md:2 fails:\nZeroDivisionError"),
        ('```python\nprint(2)\n```\n\n```text title="Output"\n3\n```', "the text differs"),
        ("```pycon\n>>> 1 + 1\n3\n```", "Expected"),
        ("```sh\nreplica-engine launch --worker\n```", "launch --worker"),
    ):
        page.write_text(text)
        with pytest.raises(AssertionError, match=word):
            pages.check("page.md", tmp_path)
    failing = '```python\nprint(1)\nraise ValueError("no")\n```\n\n'
    page.write_text(failing + '```text title="Output"\n1\nValueError: no\n```')
    pages.check("page.md", tmp_path)

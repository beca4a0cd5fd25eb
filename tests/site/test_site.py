"""The site, as a reader opens it: every page from disk, in headless Chromium, without a network.

`make test-docs` builds the site and runs this. It needs a Chromium: the Debian package `chromium`, for example, or the
path of one in the environment variable CHROMIUM.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import urllib.parse

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-docs installs playwright")

SITE = pathlib.Path(__file__).parents[2] / "site"
# 404.html is for servers: its links begin at their root.
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
# What is wider than its box: the beginning of its text, and how its background moves.
CUT = """selector => [...document.querySelectorAll(selector)].filter(each => each.scrollWidth > each.clientWidth)
  .map(each => [each.textContent.slice(0, 80), getComputedStyle(each).backgroundAttachment])"""
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="there is no site/: make docs builds it"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt install chromium, or name one in CHROMIUM"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Containers run as root, where Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page without a network; `page.complaints` are errors of the console, and what it asked the network for."""
    context = browser.new_context(viewport=DESKTOP, offline=True)
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: None if _local(request.url) else page.complaints.append(request.url))
    page.on("requestfailed", lambda request: page.complaints.append(f"failed: {request.url}"))
    yield page
    context.close()


def _local(url):
    return url.startswith(("file:", "data:", "blob:", "about:"))


def open_page(page, name):
    page.goto((SITE / name).as_uri())
    page.wait_for_function("document.querySelectorAll('pre.diagram').length === 0")
    page.wait_for_function("[...document.querySelectorAll('div.diagram')].every(each => each.querySelector('svg'))")


@pytest.fixture(scope="module")
def anchors():
    """`anchors(file)`: the anchors of a page of the site."""
    known = {}

    def of(path):
        if path not in known:
            known[path] = set(re.findall(r'\b(?:id|name)="?([^"\s>]+)', path.read_text(encoding="utf-8")))
        return known[path]

    return of


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole(page, name, anchors):
    """Neither errors nor requests, no broken link, no empty code, and it fits a phone."""
    open_page(page, name)
    assert page.complaints == []
    assert page.locator("h1").count() == 1
    codes = page.eval_on_selector_all("pre code", "all => all.map(each => each.textContent.trim().length)")
    assert 0 not in codes, "a code block without lines"
    broken = page.eval_on_selector_all("img", "all => all.filter(each => !each.naturalWidth).map(each => each.src)")
    assert broken == []
    for link in page.eval_on_selector_all("a[href]", "all => all.map(each => each.href)"):
        target = urllib.parse.urlsplit(link)
        if target.scheme == "file":
            path = pathlib.Path(urllib.parse.unquote(target.path))
            assert path.is_file(), link
            fragment = urllib.parse.unquote(target.fragment)
            assert not fragment or fragment.startswith("__") or fragment in anchors(path), link
    assert page.evaluate(CUT, "pre > code") == [], "code is cut at 1280 pixels: shorter lines, or text, which breaks"
    page.set_viewport_size(PHONE)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"], f"the page is {width} wide on a phone: what is wide has to scroll by itself"
    scrolling = page.evaluate(CUT, "pre > code, .md-typeset__scrollwrap, .diagram, p:has(> img:only-child)")
    assert all("local" in background for _, background in scrolling), "nothing shows that this scrolls"


def test_search_finds_merge_call(page):
    open_page(page, "index.html")
    page.get_by_role("textbox", name="Search").press_sequentially("merge_call")
    page.wait_for_selector(".md-search-result__link")
    found = page.locator(".md-search-result__link").all_inner_texts()
    assert any("merge_call" in text for text in found)
    assert page.complaints == []


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("eight GPUs", "howto/gpus.html"),
        ("faster on my GPU box", "howto/gpus.html"),
        ("shard a big model", "tutorials/large_models.html"),
        ("JAX or PyTorch backends", "questions.html"),
        ("save on one worker", "questions.html"),
        ("export for serving", "howto/serving.html"),
        ("Windows and macOS", "questions.html"),
        ("how to contribute", "contributing.html"),
        ("preemption", "questions.html"),
        ("elastic training", "questions.html"),
        ("horovod", "questions.html"),
        ("deterministic", "questions_training.html"),
        ("scale the learning rate", "questions_training.html"),
        ("early stopping", "questions_training.html"),
        ("loss is nan", "questions_training.html"),
        ("out of memory", "questions_training.html"),
        ("slow training", "questions_training.html"),
        ("get_replica_context None", "questions_training.html"),
        ("silence warnings", "questions_training.html"),
        ("ragged tensor", "questions_training.html"),
        ("jupyter notebook", "questions_training.html"),
        ("lookup table", "questions_training.html"),
        ("merge_call called while defining a new graph", "control_flow.html"),
        ("Ctrl-C", "howto/debug_a_hang.html"),  # not words that begin with c
        ("tensor parallelism", "tutorials/large_models.html"),
        ("set random seed", "tpu_state.html"),
        ("resume after kill -9", "howto/resume.html"),
        ("exporting", "howto/serving.html"),  # a word that no page has, but its stem
        ("tf.distribute", "howto/from_tf_distribute.html"),  # one word
        ("ScopeError", "errors/ScopeError.html"),  # errors rank last, and are found by name
    ],
)
def test_search_finds_the_answer_among_the_first_three(page, question, answer):
    open_page(page, "index.html")
    box = page.get_by_role("textbox", name="Search")
    box.fill(question)
    box.press("End")  # the search looks when a key is released: once, at the whole question
    page.wait_for_selector(".md-search-result__link")
    items = page.locator(".md-search-result__item").all()[:3]
    found = [item.locator("a").first.get_attribute("href") for item in items]
    assert any(f"/site/{answer}" in urllib.parse.unquote(link) for link in found), found
    assert page.complaints == []


@pytest.mark.parametrize("name", ["concepts/index.html", "architecture.html"])
def test_diagrams_are_pictures(page, name):
    open_page(page, name)
    sizes = page.eval_on_selector_all(
        "div.diagram > svg", "all => all.map(each => [each.clientWidth, each.querySelectorAll('text, p').length])"
    )
    assert sizes
    assert all(width > 200 and labels >= 2 for width, labels in sizes)


def test_dark_mode_draws_diagrams_again(page):
    open_page(page, "concepts/index.html")
    before = page.locator("div.diagram > svg").first.inner_html()
    page.locator("label[for=__palette_1]").click()
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    page.wait_for_function("old => document.querySelector('div.diagram > svg').innerHTML !== old", arg=before)
    assert page.complaints == []


def test_examples_of_the_reference_are_code_with_prompts(page):
    open_page(page, "reference/watching.html")
    examples = page.locator("pre code", has_text=">>> ").all_inner_texts()
    assert any("replica_engine.timeline(path)" in text and text.startswith(">>> ") for text in examples)
    prompts = page.locator("p", has_text=">>> ").count()
    assert prompts == 0, "an example has become a paragraph"
    assert page.locator(".doc-signature code").first.inner_text().startswith("timeline(")


def test_the_index_of_the_reference_has_a_line_for_each_object_and_private_bases_are_not_shown(page):
    open_page(page, "reference/index.html")
    lines = page.locator("td:first-child a").all_inner_texts()
    assert {"MirroredStrategy", "keras.replicate_model", "xla.all_reduce"} <= set(lines)
    open_page(page, "reference/strategies.html")
    bases = page.locator(".doc-class-bases code").all_inner_texts()
    assert "tf.distribute.TPUStrategy" in bases
    assert all(base.startswith("tf.") for base in bases)


def test_each_error_has_a_page():
    from replica_engine import errors

    names = [name for name in errors.__all__ if issubclass(getattr(errors, name), BaseException)]
    assert [name for name in names if f"errors/{name}.html" not in PAGES] == ["ReplicaEngineError"]

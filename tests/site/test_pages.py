"""Every page as a reader would open it: over http and from a file, at a desk and on a phone."""

from string import ascii_lowercase

import pytest

from tests.site import axe
from tests.site.browser import DESK, PHONE, page_names, visit

pytestmark = pytest.mark.site

PAGES = page_names()
PAGE_OF_CODE = "finished-engine.html"
SEEN = {}
# Transport, screen and palette. Between them each of the two of everything occurs.
WAYS = {"at a desk from a file": ("file", DESK, "light"), "on a phone": ("http", PHONE, "dark")}


@pytest.fixture
def look(browser, addresses):
    """look(page, way): what one visit found. Each page is opened once a way."""

    def look(name, way):
        if (name, way) not in SEEN:
            transport, viewport, scheme = WAYS[way]
            base = addresses[transport]
            with visit(browser, base, name, viewport=viewport, scheme=scheme) as opened:
                opened.page.evaluate(
                    "document.querySelectorAll('details').forEach(d => d.open = true)"
                )
                SEEN[name, way] = {
                    "errors": list(opened.errors),
                    "outside": list(opened.outside),
                    "findings": findings(opened.page, name) if axe.has_npm() else None,
                    "too_wide": opened.page.evaluate(TOO_WIDE),
                }
        return SEEN[name, way]

    return look


def findings(page, name):
    """Code is coloured alike on all pages, in thousands of parts: one page with code is enough."""
    return axe.serious_findings(page, [] if name == PAGE_OF_CODE else [".highlight"])


# What sticks out to the right of the screen and does not scroll inside a frame of its own.
TOO_WIDE = """() => {
    const width = document.documentElement.clientWidth
    if (document.documentElement.scrollWidth <= width) return []
    return [...document.querySelectorAll("main *")]
        .filter((e) => e.getBoundingClientRect().right > width + 1)
        .map((e) => e.outerHTML.slice(0, 120))
        .concat([`the page is ${document.documentElement.scrollWidth} wide`])
}"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_console_error(look, name, way):
    assert look(name, way)["errors"] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_nothing_of_the_outside(look, name, way):
    assert look(name, way)["outside"] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_no_wider_than_the_screen(look, name, way):
    assert look(name, way)["too_wide"] == []


@pytest.mark.skipif(not axe.has_npm(), reason="no npm found: axe-core cannot be fetched")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_serious_accessibility_finding(look, name, way):
    findings = look(name, way)["findings"]
    assert findings == [], "\n".join(findings)


@pytest.mark.parametrize("transport", ["http", "file"])
@pytest.mark.parametrize("words", ["ref count", "suffix prefill", "LRU"])
def test_search_finds(browser, addresses, transport, words):
    with visit(browser, addresses[transport], "index.html") as opened:
        search = opened.page.get_by_role("textbox", name="Search")
        search.click()
        # Words that are typed while the theme still reads the index can be an error of its own.
        opened.page.get_by_text("Type to start searching").wait_for(timeout=10_000)
        search.press_sequentially(words)
        found = opened.page.locator(".md-search-result__item", has_text=words)
        found.first.wait_for(timeout=10_000)
        assert any("Glossary" in text for text in found.all_inner_texts())
        assert opened.errors == []


def test_search_takes_any_letter_to_begin_with(browser, served):
    with visit(browser, served, "index.html") as opened:
        search = opened.page.get_by_role("textbox", name="Search")
        search.click()
        opened.page.get_by_text("Type to start searching").wait_for(timeout=10_000)
        for letter in ascii_lowercase:
            search.fill("")
            search.press_sequentially(letter)
            opened.page.wait_for_timeout(200)  # for a query of its own
        assert opened.errors == []


def test_a_folded_answer_opens_on_a_click(browser, served):
    with visit(browser, served, "index.html") as opened:
        answer = opened.page.locator("details", has_text="One person pays for everything")
        text = answer.locator("p", has_text="One person pays")
        assert not text.is_visible()
        answer.locator("summary").click()
        assert text.is_visible()


def test_a_folded_answer_opens_by_key(browser, served):
    with visit(browser, served, "index.html") as opened:
        answer = opened.page.locator("details", has_text="One person pays for everything")
        answer.locator("summary").focus()
        opened.page.keyboard.press("Enter")
        assert answer.locator("p", has_text="One person pays").is_visible()


def test_the_palette_can_be_switched(browser, served):
    with visit(browser, served, "index.html") as opened:
        ground = "getComputedStyle(document.body).backgroundColor"
        light = opened.page.evaluate(ground)
        opened.page.locator("label[title='Switch to dark']").click()
        assert opened.page.evaluate(ground) != light


def test_a_term_of_the_glossary_carries_its_meaning(browser, served):
    with visit(browser, served, "index.html") as opened:
        term = opened.page.locator("abbr", has_text="prefix cache").first
        term.hover()
        opened.page.get_by_text("Full blocks of KV that stay findable").wait_for(timeout=5_000)


def test_a_formula_is_drawn_by_the_browser(browser, served):
    with visit(browser, served, "contributing.html") as opened:
        box = opened.page.locator("math msub").first.bounding_box()
        assert box["width"] > 5
        assert box["height"] > 5

"""The eyes that the page tests look with see each fault that they are there for."""

import pytest

from tests.site import axe
from tests.site.browser import PHONE, visit
from tests.site.test_pages import TOO_WIDE

pytestmark = pytest.mark.site

FAULTY = """<!doctype html><html lang="en"><title>faulty</title><main>
<script>console.error("planted")</script>
<script>undefined_name()</script>
<img src="http://127.0.0.1:9/outside.png">
<div style="width: 500px">wide</div>
</main></html>"""


@pytest.fixture
def faulty(browser, tmp_path):
    (tmp_path / "faulty.html").write_text(FAULTY)
    with visit(browser, tmp_path.as_uri(), "faulty.html", viewport=PHONE) as opened:
        yield opened


def test_a_console_error_is_seen(faulty):
    assert "planted" in faulty.errors


def test_an_exception_of_a_script_is_seen(faulty):
    assert any("undefined_name" in error for error in faulty.errors)


def test_a_request_to_the_outside_is_seen(faulty):
    assert faulty.outside == ["http://127.0.0.1:9/outside.png"]


def test_something_wider_than_the_screen_is_seen(faulty):
    assert any("wide" in found for found in faulty.page.evaluate(TOO_WIDE))


@pytest.mark.skipif(not axe.has_npm(), reason="no npm found: axe-core cannot be fetched")
def test_an_image_without_words_is_seen(faulty):
    assert any(finding.startswith("image-alt") for finding in axe.serious_findings(faulty.page))

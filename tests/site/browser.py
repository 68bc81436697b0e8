"""A headless Chromium that is there already, and what a page does while it is open."""

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import yaml
from playwright.sync_api import sync_playwright

from book.places import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}


def find_chromium():
    """$CHROMIUM, or the first one on the path; None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser(path):
    """A browser; `--no-sandbox` because a container's root may not make one."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


def page_names():
    """Every page of the navigation, as the site names its file."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return [name.removesuffix(".md") + ".html" for name in _leaves(config["nav"])]


def _leaves(entry):
    if isinstance(entry, str):
        return [entry]
    items = entry.values() if isinstance(entry, dict) else entry
    return [leaf for item in items for leaf in _leaves(item)]


@dataclass
class Visit:
    """One open page, and what it has done so far: what went wrong, and what it asked others for."""

    page: object
    errors: list = field(default_factory=list)
    outside: list = field(default_factory=list)


@contextmanager
def visit(browser, base, name, *, viewport=DESK, scheme="light", touch=False):
    """Open a page of the site and listen; it is ready when its players are."""
    context = browser.new_context(
        viewport=viewport, color_scheme=scheme, has_touch=touch, reduced_motion="reduce"
    )
    page = context.new_page()
    opened = Visit(page)
    page.on("console", lambda m: m.type in ("error", "warning") and opened.errors.append(m.text))
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("requestfailed", lambda request: opened.errors.append(f"failed: {request.url}"))
    page.on("request", lambda r: is_outside(r.url, base) and opened.outside.append(r.url))
    page.goto(f"{base}/{name}")
    players = page.locator(".block-table-player[data-trace]")
    for i in range(players.count()):
        players.nth(i).locator(".btp-pool").wait_for(timeout=10_000)
    yield opened
    context.close()


def is_outside(url, base):
    """True for a request that leaves the site."""
    return not url.startswith((base, "data:", "blob:", "about:"))

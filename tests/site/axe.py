"""axe-core, an accessibility checker: from the npm registry, pinned, fetched once."""

import hashlib
import shutil
import subprocess

from book.places import ROOT

VERSION = "4.14.1"
SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
FOLDER = ROOT / "build" / "axe" / VERSION
# The rules of WCAG 2.1, A and AA; nothing is loaded again, which a page from a file may not do.
RUN = """(excluded) => axe.run({exclude: excluded}, {
    runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
    resultTypes: ["violations"],
    preload: false,
})"""
SCRIPT = FOLDER / "node_modules" / "axe-core" / "axe.min.js"


def has_npm():
    """True if axe-core is there, or can be fetched."""
    return SCRIPT.exists() or shutil.which("npm") is not None


def source():
    """The script's text; the first time npm fetches it. Nothing of the package is run by npm."""
    if not SCRIPT.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run([*command, f"axe-core@{VERSION}"], cwd=FOLDER, check=True)
    text = SCRIPT.read_bytes()
    found = hashlib.sha256(text).hexdigest()
    assert found == SHA256, f"axe-core {VERSION} has sha256 {found}, not {SHA256}: delete {FOLDER}"
    return text.decode()


def serious_findings(page, excluded=()):
    """What axe finds serious or critical on an open page, one line each.

    excluded   selectors of what need not be looked at
    """
    page.evaluate(source())
    violations = page.evaluate(RUN, list(excluded))["violations"]
    return [
        f"{violation['id']} ({violation['impact']}): {node['html'][:160]} "
        f"{node['failureSummary'].splitlines()[-1].strip()}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]

"""Opens pages in a headless Chromium, as a reader's browser does."""

import contextlib
import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable():
    """The browser that is installed: $CHROMIUM, or the first on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


# What a reader cannot see: text beyond a chart's edges, and tables wider than their room.
_CUT = """() => {
  const beyond = (a, b) => a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1;
  const texts = [...document.querySelectorAll(".chart svg")].flatMap((svg) =>
    [...svg.querySelectorAll("text")].filter((text) => text.getBoundingClientRect().width
      && beyond(text.getBoundingClientRect(), svg.getBoundingClientRect())));
  const wide = [...document.querySelectorAll(".wide")];
  const tables = wide.filter((table) => table.scrollWidth > table.clientWidth);
  return [...texts, ...tables].map((e) => e.textContent.slice(0, 80));
}"""


def cut(page):
    """The texts of a page that are not wholly in sight, folded parts unfolded."""
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    page.wait_for_timeout(300)
    return page.evaluate(_CUT)


@pytest.fixture(scope="module")
def open_page():
    """A function that opens a file, waits for its charts, and collects what went wrong.

    The page has two attributes beside Playwright's: `problems`, what the console and dialogs said,
    and `requested`, the addresses that were asked for.
    """
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no driver of browsers: pip install playwright"
    )
    if not executable():
        pytest.skip("no browser: apt-get install chromium, or set CHROMIUM to one's path")
    # Chromium cannot confine itself where its user is root, as in a container.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with contextlib.ExitStack() as stack:
        chromium = stack.enter_context(playwright.sync_playwright()).chromium
        browser = chromium.launch(executable_path=executable(), args=flags)
        stack.callback(browser.close)

        def open_file(file, *, scheme="light", width=1280, scripts=True):
            page = browser.new_page(
                color_scheme=scheme,
                viewport={"width": width, "height": 900},
                java_script_enabled=scripts,
            )
            page.problems, page.requested = [], []
            page.on("console", lambda said: page.problems.append(f"{said.type}: {said.text}"))
            page.on("pageerror", lambda error: page.problems.append(str(error)))
            page.on("dialog", lambda dialog: (page.problems.append("dialog"), dialog.dismiss()))
            page.on("request", lambda request: page.requested.append(request.url))
            page.goto(file.as_uri())
            if scripts:
                page.wait_for_selector("html[data-drawn]", state="attached", timeout=30_000)
            return page

        yield open_file

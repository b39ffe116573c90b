"""The built site needs no network, and every page can be read, at the width of a desk and of a phone.

`nox -s docs` runs what needs no browser, and `nox -s site` all.
"""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).parent / "_build" / "html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ("no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update")

pytestmark = pytest.mark.skipif(not SITE.exists(), reason="the site is not built: nox -s docs")


class Page(HTMLParser):
    """The links of a page and of its side bar, the files that it loads, and what can be linked to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.side_bar, self.files, self.anchors = set(), set(), set(), {""}
        self.is_in_side_bar = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        if tag == "nav":
            self.is_in_side_bar = "bd-docs-nav" in attributes.get("class", "")
        if tag == "a":
            self.links.add(attributes.get("href", ""))
            if self.is_in_side_bar:
                self.side_bar.add(attributes["href"])
        else:
            self.files |= {attributes.get("src", ""), attributes.get("href", "")}

    def handle_endtag(self, tag):
        self.is_in_side_bar &= tag != "nav"


@pytest.fixture(scope="module")
def pages():
    paths = (path for path in SITE.rglob("*.html") if "_static" not in path.parts)
    found = {path: Page(path) for path in sorted(paths)}
    assert SITE / "index.html" in found
    return found


def is_elsewhere(address):
    return bool(urlsplit(address).netloc)


def test_nothing_is_loaded_from_elsewhere(pages):
    styles = {path: path.read_text() for path in SITE.rglob("*.css")}
    in_styles = {
        (path, address)
        for path, text in styles.items()
        for address in re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]*)", text)
    }
    in_pages = {
        (path, file) for path, page in pages.items() for file in page.files if is_elsewhere(file)
    }
    assert styles
    assert in_styles | in_pages == set()


def test_links_within_the_site_lead_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for address in page.links | page.files:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or (
                target in pages and unquote(parts.fragment) not in pages[target].anchors
            ):
                broken.append((str(path.relative_to(SITE)), address))
    assert broken == []


def test_side_bar_has_the_contents(pages):
    """All pages of the contents, on each page."""
    contents = (SITE.parents[1] / "_templates" / "contents.md").read_text()
    names = re.findall(r"^[\w/-]+$", contents, re.MULTILINE)
    assert "tutorial" in names
    for path, page in pages.items():
        side_bar = {
            (path.parent / address).resolve().relative_to(SITE).with_suffix("").as_posix()
            for address in page.side_bar
            if address != "#"
        }
        own = path.relative_to(SITE).with_suffix("").as_posix()
        assert set(names) <= side_bar | {own}, path


def test_reference_names_all_parameters(pages):
    reference = (path for path in pages if "reference" in path.parts)
    texts = {path: re.sub("<[^>]*>", "", path.read_text()) for path in reference}
    assert any("LogLength(base=512" in text for text in texts.values())
    assert [path for path, text in texts.items() if "(*args, **kwargs)" in text] == []


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: nox -s site")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of these browsers is installed: {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        options = [f"--{option}" for option in OPTIONS]
        yield driver.chromium.launch(executable_path=program, args=options)


# What is wrong with the page that is open, as a list of strings.
FAULTS = r"""() => {
  const faults = [], say = (fault, e) => faults.push(`${fault}: ${(e.outerHTML).slice(0, 100)}`);
  const article = document.querySelector("article") ?? document.body;
  const right = e => e.getBoundingClientRect().right;
  const isTooWide = e => e.scrollWidth > e.clientWidth + 1;

  if (isTooWide(document.documentElement)) faults.push("the page is wider than the window");
  for (const e of document.querySelectorAll(".bd-sidebar-primary, .bd-sidebar-secondary"))
    if (isTooWide(e)) say("text wider than its side bar", e);
  const scrollable = "pre, .formula, .image-reference, .pst-scrollable-table-container";
  for (const e of article.querySelectorAll(scrollable)) {
    if (isTooWide(e) && !["auto", "scroll"].includes(getComputedStyle(e).overflowX)) say("cut off", e);
    if (isTooWide(e) && innerWidth > 1000 && e.matches("pre, .formula")) say("longer than its line", e);
  }
  for (const e of article.querySelectorAll(":not(.headerlink)"))
    if (right(e) > right(article) + 1 && !e.parentElement.closest(scrollable))
      say("wider than the text", e);
  const texts = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (texts.nextNode()) {
    range.selectNode(texts.currentNode);
    const e = texts.currentNode.parentElement;
    if (right(range) > right(article) + 1 && !e.closest(scrollable + ", .headerlink"))
      say("too long a line", e);
  }

  for (const e of article.querySelectorAll("img"))
    if (!e.complete || !e.naturalWidth) say("not shown", e);

  for (const e of article.querySelectorAll(".math, merror")) say("formula not rendered", e);
  for (const e of article.querySelectorAll("math"))
    if (!(e.getBoundingClientRect().width > 0)) say("empty formula", e);
  for (const e of article.querySelectorAll("mfrac")) {
    const [above, below] = [...e.children].map(child => child.getBoundingClientRect());
    if (above.bottom > below.top + 1) say("fraction on one line", e);
  }
  const text = article.cloneNode(true);
  text.querySelectorAll("pre, code, math, script").forEach(e => e.remove());
  const tex = text.textContent.match(/\\[a-z([]\S*|\$[^$\s][^$]*\$/);
  if (tex) faults.push(`TeX in the text: ${tex[0]}`);
  return faults;
}"""


@pytest.mark.parametrize("width", [1400, 420])
def test_pages_in_a_browser(browser, pages, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    tab = context.new_page()
    faults = []
    tab.on("console", lambda message: message.type == "error" and faults.append(message.text))
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("requestfailed", lambda request: faults.append(f"not loaded: {request.url}"))

    def refuse(route):
        faults.append(f"asked for {route.request.url}")
        route.abort()

    context.route(lambda address: not address.startswith(("file:", "data:")), refuse)
    wrong = {}
    for path in pages:
        tab.goto(path.as_uri(), wait_until="load")
        if found := [*faults, *tab.evaluate(FAULTS)]:
            wrong[str(path.relative_to(SITE))] = found
        faults.clear()
    context.close()
    assert wrong == {}

"""The report in a real browser: headless Chromium through Playwright, from file://; skipped where there is none."""

from __future__ import annotations

import re
import shutil

import pytest

from repro.claims import CLAIMS, VERDICTS
from tests.report import html_pages
from tests.report.html_pages import CPU, GPU
from tests.report.test_html import HOSTILE

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
VISIBLE = "#claims tbody tr:not([hidden])"


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} on PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as e:
            pytest.skip(f"{path} does not start: {str(e).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return html_pages.make(tmp_path_factory.mktemp("page")).path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return html_pages.make(tmp_path_factory.mktemp("hostile"), HOSTILE, HOSTILE).path


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    path = tmp_path_factory.mktemp("committed") / "report.html"
    path.write_text(html_pages.committed())
    return path


@pytest.fixture
def show(browser):
    """Opens a file and returns its page, which must stay silent and ask for nothing else until the test is over."""
    contexts, complaints = [], []

    def opened(path, viewport=DESKTOP, scheme="light", scripts=True):
        context = browser.new_context(viewport=viewport, color_scheme=scheme, java_script_enabled=scripts)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: complaints.append(f"error: {e}"))
        own = path.as_uri()
        page.on("request", lambda r: r.url.startswith(("data:", own)) or complaints.append(f"request: {r.url}"))
        page.goto(own)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def ids(page):
    """Ids of the claims that the table shows, from top to bottom."""
    return page.locator(VISIBLE).evaluate_all("rows => rows.map(row => row.dataset.claim)")


def heading(page, text):
    return page.locator("table.claims th[data-sorts]").filter(has_text=text)


def gains(page):
    """First, second and fourth cell of every line of the explorer: policy, AdaLN, gain."""
    cells = "rows => rows.map(row => [0, 1, 3].map(i => row.cells[i].textContent))"
    return [tuple(r) for r in page.locator(".gains tbody tr").evaluate_all(cells)]


def setting(page, name):
    return page.locator(f".explorer select[name={name}]")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("which", ["small", "hostile", "committed"])
def test_everything_fits_and_every_image_is_there(show, request, which, viewport):
    page = show(request.getfixturevalue(which), viewport)
    page.locator("details").evaluate_all("boxes => boxes.forEach(box => { box.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.locator("img").count() > 0
    assert page.locator("img").evaluate_all("images => images.every(i => i.complete && i.naturalWidth > 0)")


def test_text_from_files_does_nothing(show, hostile):
    page = show(hostile)
    setting(page, "corpus").select_option(
        label=next(t for t in setting(page, "corpus").inner_text().splitlines() if HOSTILE in t)
    )
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    assert HOSTILE in page.locator("#K1").inner_text()


def test_dark_and_light_differ_and_both_can_be_read(show, small):
    contrasts = """() => {
      const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      const light = (color) => {
        const [r, g, b] = color.match(/[\\d.]+/g).map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const style = (selector) => getComputedStyle(document.querySelector(selector));
      const ratio = (text, back) => (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
      const back = light(style("body").backgroundColor);
      const chips = [...document.querySelectorAll(".verdicts .chip")].map((chip) => {
        const own = getComputedStyle(chip);
        const behind = own.backgroundColor === "rgba(0, 0, 0, 0)" ? back : light(own.backgroundColor);
        return ratio(light(own.color), behind);
      });
      const plain = ["body", ".lead a", "figcaption", "thead th"].map((s) => ratio(light(style(s).color), back));
      return [back, Math.min(...chips, ...plain)];
    }"""
    backs = {}
    for scheme in ("light", "dark"):
        backs[scheme], contrast = show(small, scheme=scheme).evaluate(contrasts)
        assert contrast >= 4.5, f"{scheme}: contrast below WCAG AA"
    assert backs["dark"] < 0.05 < 0.9 < backs["light"]


class TestTable:
    def test_it_starts_with_what_decides_in_the_papers_order(self, show, small):
        page = show(small)
        assert ids(page) == [c.id for c in CLAIMS]
        assert page.locator("#claims output").inner_text() == "18 of 20 rows"
        assert heading(page, "id").get_attribute("aria-sort") == "ascending"

    def test_a_heading_sorts_both_ways(self, show, small):
        page = show(small)
        heading(page, "verdict").get_by_role("button").click()
        verdict_of = "rows => rows.map(row => row.dataset.verdict)"
        order = [VERDICTS.index(v) for v in page.locator(VISIBLE).evaluate_all(verdict_of)]
        assert order == sorted(order) and len(set(order)) > 2
        assert heading(page, "verdict").get_attribute("aria-sort") == "ascending"
        assert heading(page, "id").get_attribute("aria-sort") is None
        assert ids(page)[-15:] == [c.id for c in CLAIMS if c.id not in ("K1", "K4", "T1")], "equals keep their order"
        heading(page, "verdict").get_by_role("button").click()
        assert heading(page, "verdict").get_attribute("aria-sort") == "descending"
        assert ids(page)[-1] == "K1"

    def test_numbers_sort_as_numbers_and_unknown_ones_come_last(self, show, small):
        page = show(small)
        heading(page, "ours").get_by_role("button").click()
        assert ids(page)[:3] == ["K4", "K1", "T1"]  # 2, 4, 5
        heading(page, "ours").get_by_role("button").click()
        assert ids(page)[:3] == ["T1", "K1", "K4"]

    def test_it_sorts_by_keyboard(self, show, small):
        page = show(small)
        heading(page, "paper's claim").get_by_role("button").focus()
        page.keyboard.press("Enter")
        statements = page.locator(VISIBLE).evaluate_all("rows => rows.map(row => row.dataset.statement)")
        assert statements == sorted(statements, key=str.lower)

    def test_filters_combine_and_clear(self, show, small):
        page = show(small)
        choose = page.get_by_label
        choose("verdict").select_option("partly")
        assert ids(page) == ["K4", "T1"]
        choose("kind").select_option("simulated")
        assert ids(page) == ["T1"]
        assert page.locator("#claims output").inner_text() == "1 of 20 rows"
        choose("verdict").select_option("exceeded")
        assert ids(page) == []
        assert page.get_by_text("No claim is left").is_visible()
        page.get_by_role("button", name="Clear").click()
        assert len(ids(page)) == 18
        assert page.get_by_text("No claim is left").is_hidden()

    def test_other_devices_rows_are_shown_on_demand(self, show, small):
        page = show(small)
        device = page.locator("#claims select[name=device]")
        device.select_option("*")
        assert ids(page)[:3] == ["K1", "K1", "K2"]
        device.select_option(CPU)
        assert ids(page) == ["K1", "K4"]
        device.select_option(GPU)
        assert ids(page) == ["K1", "K4", "T1"]


class TestExplorer:
    def test_it_starts_with_the_papers_setting(self, show, small):
        page = show(small)
        assert gains(page) == [
            ("equal-token (baseline)", "eager", "baseline"),
            ("equal-token (baseline)", "fused (ours)", "+2.0 [+1.0, +3.0]"),
            ("dual constraint (paper)", "fused (ours)", "+12.0 [+11.0, +13.0]"),
            ("balanced (ours)", "fused (ours)", "+62.0 [+61.0, +63.0]"),
        ]
        assert "The paper reports +27.2%" in page.locator(".setting").inner_text()
        assert re.search(
            rf"Simulated from full rows of {GPU}: suite gains, run \S+; 5 seeds", page.locator(".origin").inner_text()
        )

    def test_a_choice_shows_its_rows(self, show, small):
        page = show(small)
        setting(page, "ranks").select_option(label="8")
        assert ("balanced (ours)", "fused (ours)", "+31.0 [+30.0, +32.0]") in gains(page)
        assert "The paper reports +25.6%" in page.locator(".setting").inner_text()
        assert page.locator(".moved").inner_text() == ""

    def test_adaln_and_m_comp_choose_among_the_settings_rows(self, show, small):
        page = show(small)
        setting(page, "m_comp").select_option("1.5")
        assert [g[0] for g in gains(page) if g[0].startswith("dual")] == ["dual constraint (paper), M_comp x 1.5"]
        setting(page, "m_comp").select_option("1")
        setting(page, "adaln").select_option("any")
        assert len(gains(page)) == 6
        setting(page, "adaln").select_option(label="eager: 3")
        assert {g[1] for g in gains(page)} == {"eager"}

    def test_what_was_not_simulated_together_moves_the_other_choices_and_says_so(self, show, small):
        page = show(small)
        setting(page, "ranks").select_option(label="8")
        setting(page, "corpus").select_option(label="images *")
        assert setting(page, "ranks").locator("option:checked").inner_text() == "16"
        assert page.locator(".moved").inner_text() == "Not simulated with the other choices: ranks is now 16."
        assert ("dual constraint (paper)", "eager", "+10.0 [+9.0, +11.0]") in gains(page)
        assert "paper reports" not in page.locator(".setting").inner_text()

    def test_another_device_may_have_a_handful_of_rows(self, show, small):
        page = show(small)
        setting(page, "device").select_option(label=f"{CPU} *")
        assert [g[0] for g in gains(page)] == ["equal-token (baseline)", "dual constraint (paper)", "balanced (ours)"]
        assert f"Simulated from smoke rows of {CPU}" in page.locator(".origin").inner_text()

    def test_every_setting_of_the_committed_results_can_be_reached(self, show, committed):
        page = show(committed)
        for name in ("corpus", "ranks", "memory", "model", "steps", "sync"):
            select = setting(page, name)
            for value in select.evaluate("select => [...select.options].map(o => o.value)"):
                if select.is_visible():
                    select.select_option(value)
                    assert select.input_value() == value
                    assert gains(page), (name, value)

    def test_bars_grow_with_the_gain_and_draw_the_papers(self, show, small):
        page = show(small)
        width = "bars => bars.map(bar => Number(bar.getAttribute('width')))"
        assert page.locator(".gains rect.bar").evaluate_all(width) == pytest.approx([100 * g / 63 for g in (2, 12, 62)])
        assert page.locator(".gains line.paper").count() == 4


def test_the_keyboard_reaches_everything(show, small):
    page = show(small)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the claims"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#claims"
    reached = set()
    for _ in range(400):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name || document.activeElement.tagName"))
        if page.evaluate("document.activeElement === document.body"):
            break
    assert {"verdict", "kind", "device", "corpus", "ranks", "memory", "adaln", "SUMMARY", "A", "BUTTON"} <= reached


def test_a_link_to_a_run_opens_it(show, small):
    page = show(small)
    page.locator("#K1 a[href^='#run-']").first.click()
    playwright.expect(page.locator(f"details[id^='run-{GPU}'][open]")).to_have_count(1)


def test_without_scripts_the_page_still_tells_everything_but_the_explorer(show, small):
    page = show(small, scripts=False)
    assert page.locator("#claims tbody tr").count() == 20
    assert page.locator("#claims form").is_hidden()
    assert page.locator("noscript").inner_text().startswith("The explorer needs JavaScript")

"""The report page, in a real browser: what it shows, what it does, and what it never does."""

import itertools
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.limits import seconds

pytest.importorskip("playwright")

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from steppe.reports import build_report, load_runs, write
from steppe.reports.cells import Cell, cell_text, p_text, points_text
from steppe.reports.page import figures, render_page
from steppe.reports.palette import COLOURS, KNOWN, looks
from tests.reports.page_sample import EMPTY, HOSTILE, NAMES, hostile, sample
from tests.reports.trees import config, record, write_run

Open = Callable[..., Page]
PHONE = {"viewport": {"width": 360, "height": 740}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        message = "no chromium on the path: apt-get install chromium"
        if os.environ.get("STEPPE_NEEDS_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a report; whatever the test does there, nothing may be complained of or requested."""
    complaints: list[str] = []
    requests: list[str] = []
    pages = []

    def opened(data: dict[str, Any], **options: Any) -> Page:
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(render_page(data), encoding="utf-8")
        page = browser.new_page(**{"viewport": {"width": 1100, "height": 900}, **options})
        page.set_default_timeout(1000 * seconds(60))
        expect.set_options(timeout=1000 * seconds(60))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(error.stack or error.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        pages.append((page, file.as_uri()))
        return page

    yield opened
    probes = [page.evaluate("window.pwned") for page, _ in pages]
    for page, _ in pages:
        page.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [url for _, url in pages]
    assert probes == [None] * len(pages)


def keep(page: Page, name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("STEPPE_ARTIFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"report-{name}.png", full_page=True)


def column(table: Locator, index: int) -> list[str]:
    return [
        text.strip()
        for text in table.locator(f"tbody tr > :nth-child({index + 1})").all_inner_texts()
    ]


def chart(page: Page, section: str) -> Locator:
    drawn = page.locator(f"#{section} .chart svg")
    drawn.scroll_into_view_if_needed()
    return drawn


def choose(page: Page, section: str, label: str, option: str) -> None:
    page.locator(f"#{section} .controls label", has_text=re.compile(f"^{label}")).locator(
        "select"
    ).select_option(option)


def axis(drawn: Locator, which: str) -> Callable[[float], float]:
    """From a value to its place on the screen, by two of the axis' own labels."""
    labels = drawn.locator(f".{which}-ticks text").all()
    (one, here), (two, there) = (
        (float(label.inner_html().replace("−", "-")), label.bounding_box())
        for label in (labels[0], labels[-1])
    )
    side, length = ("x", "width") if which == "x" else ("y", "height")
    here, there = (box[side] + box[length] / 2 for box in (here, there))
    return lambda value: here + (value - one) / (two - one) * (there - here)


def tip(page: Page) -> str:
    return page.locator("#tip").inner_text() if page.locator("#tip").is_visible() else ""


def test_the_file_cannot_be_broken_out_of() -> None:
    data = hostile() | {"command": "\udcff.jsonl"}  # a file name that is not UTF-8
    page = render_page(data)
    assert page.isascii()
    assert len(re.findall("<script", page, re.IGNORECASE)) == 2
    assert len(re.findall("</script", page, re.IGNORECASE)) == 2
    assert "<!--" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    read = json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["command"] == "\udcff.jsonl"
    assert read["title"] == data["title"]


def test_names_of_files_that_are_not_text_can_be_saved(show: Open) -> None:
    page = show(sample(n_methods=2) | {"title": "run \udcff", "command": "a\udcff b"})
    assert page.locator("h1").inner_text() == "run �"


def test_hostile_texts_are_shown_and_run_nothing(show: Open) -> None:
    page = show(hostile() | {"problems": list(HOSTILE)})
    assert page.title() == HOSTILE[0]
    assert page.locator(".problems li").all_text_contents() == list(HOSTILE)
    assert page.locator("script").count() == 2
    assert page.locator("img, iframe, object, base, form").count() == 0
    # Whatever can be pointed at, chosen or pressed.
    tips = set()
    for drawn in page.locator(".chart svg").all():
        for key in ("ArrowRight", "End", "ArrowLeft"):
            drawn.press(key)
            tips.add(tip(page))
    assert all(any(text[:20] in tip for tip in tips) for text in HOSTILE[:3])
    page.evaluate(
        """() => document.querySelectorAll("select").forEach((menu) => {
          for (let i = 0; i < menu.options.length; i++) {
            menu.selectedIndex = i;
            menu.dispatchEvent(new Event("change"));
          }
        })"""
    )
    page.evaluate(
        "document.querySelectorAll('thead button, .legend button').forEach(b => b.click())"
    )


def test_the_policy_stops_what_a_mistake_would_let_in(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(render_page(sample(n_methods=2)), encoding="utf-8")
    page = browser.new_page()
    page.goto(file.as_uri())
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    blocked = page.evaluate(
        """async (address) => {
          const seen = [];
          addEventListener("securitypolicyviolation", (e) => seen.push(e.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "window.pwned = 1";
          const image = new Image();
          image.src = `${address}/x.png`;
          const style = document.createElement("style");
          style.textContent = "body { display: none }";
          document.body.append(script, image, style);
          await fetch(address).catch(() => null);
          await new Promise((done) => setTimeout(done, 50));
          return [seen.sort(), window.pwned ?? null];
        }""",
        f"http://127.0.0.1:{server.getsockname()[1]}",
    )
    page.close()
    assert blocked == [["connect-src", "img-src", "script-src-elem", "style-src-elem"], None]
    with server, pytest.raises(BlockingIOError):  # nobody knocked
        server.accept()


def test_a_report_of_nothing(show: Open) -> None:
    page = show(EMPTY)
    assert "No finished runs yet" in page.locator("#results").inner_text()
    assert page.locator("section").evaluate_all("all => all.map(s => s.id)") == [
        "results",
        "provenance",
    ]
    # Empty insides, and keys that are not there at all.
    bare = dict.fromkeys(EMPTY)
    hollow = {
        "tables": [{"dataset": None, "columns": None, "rows": []}, {"rows": [{"cells": None}]}],
        "across": {"rows": [None]},
        "cost": [{}],
        "curves": [{"series": [{"name": None, "steps": [1, None], "val": [None, None]}]}],
        "sensitivity": [{"points": [{}]}],
        "flatness": [{"spectrum": None}],
        "comparisons": [{"difference": None}, {"difference": 1.0}],
    }
    for data in ({}, bare, hollow):
        assert show(data).locator("#provenance").is_visible()


def test_tables_sort_by_number_and_mark_the_best(show: Open) -> None:
    data = sample()
    table = data["tables"][0]
    # As text, 100 comes before 9.5 and 99.46 after 99.5. Three are best as printed; one is of a
    # single trial.
    means = [100.04, 9.5, 99.5, None, 99.96, 100.0, 99.46]
    for row, mean in zip(table["rows"], means, strict=True):
        row["cells"]["photo"] = None if mean is None else {"mean": mean, "err": 0.3, "n": 3}
    table["rows"][6]["cells"]["photo"] |= {"n": 1, "err": 0.0}
    page = show(data)
    shown = page.locator("#results table").nth(1)
    assert column(shown, 0) == list(NAMES)
    printed = ["100.0 ± 0.3", "9.5 ± 0.3", "99.5 ± 0.3", "–", "100.0 ± 0.3", "100.0 ± 0.3", "99.5"]
    written = [cell.removesuffix("\n(best)") for cell in column(shown, 3)]
    assert written == printed
    best = shown.locator("tbody tr > :nth-child(4)").evaluate_all(
        "cells => cells.map(c => c.classList.contains('best'))"
    )
    assert best == [True, False, False, False, True, True, False]

    def order(reverse: bool) -> list[str]:
        known = [pair for pair in zip(NAMES, means, strict=True) if pair[1] is not None]
        return [name for name, _ in sorted(known, key=lambda pair: pair[1], reverse=reverse)] + [
            "gam"
        ]

    def directions() -> list[str]:
        return shown.locator("thead th").evaluate_all("all => all.map(h => h.ariaSort)")

    photo = shown.locator("thead button", has_text="photo")
    photo.click()
    assert column(shown, 0) == order(reverse=True)
    assert directions() == ["none"] * 3 + ["descending"] + ["none"] * 5
    photo.press("Enter")
    assert column(shown, 0) == order(reverse=False)
    assert directions()[3] == "ascending"
    shown.locator("thead button", has_text="method").press("Space")
    assert column(shown, 0) == sorted(NAMES, key=str.lower)
    assert directions() == ["ascending"] + ["none"] * 8


def test_the_first_screen_answers(show: Open) -> None:
    data = sample()
    page = show(data)
    first, second = data["answer"]
    assert page.locator("#answer .lead").inner_text() == first
    assert second in page.locator("#answer").inner_text()
    ids = page.locator("section").evaluate_all("all => all.map(s => s.id)")
    assert ids[:3] == ["answer", "comparisons", "results"]
    assert data["multiplicity"]["note"] in page.locator("#comparisons").inner_text()


def test_numbers_are_rounded_as_in_the_terminal(show: Open) -> None:
    # Exact ties, which JavaScript alone would round up, and numbers beside them.
    means = [66.25, 66.75, 0.25, 66.35, 66.24999999999999, 99.95, 0.05]
    data = sample(7, ("PACS",))
    for row, mean in zip(data["tables"][0]["rows"], means, strict=True):
        row["cells"]["photo"] = {"mean": mean, "err": 0.0, "n": 1}
    table = show(data).get_by_role("region", name="PACS", exact=True).locator("table")
    written = [cell.removesuffix("\n(best)") for cell in column(table, 3)]
    assert written == [cell_text(Cell(mean, 0.0, 1)) for mean in means]


def test_short_runs_take_some_time(show: Open, tmp_path: Path) -> None:
    records = [record(step, ("photo",), lambda d, p: 0.5) for step in (0, 1)]  # a second in all
    write_run(tmp_path / "run", config(("photo",), device="cpu"), records)
    report = build_report(load_runs(tmp_path))
    assert report.answer[1] == "The run took less than 0.001 CPU-hours."
    assert "< 0.001" in write(report, "markdown")
    page = show(report.page_data())
    assert "< 0.001" in page.locator("#cost table").inner_text()
    drawn = chart(page, "cost")
    drawn.focus()
    drawn.press("End")
    assert "< 0.001" in tip(page)


def test_p_values_are_written_as_in_the_terminal(show: Open) -> None:
    data = sample(8)
    found = [0.0496, 0.0504, 0.05, 0.0002, 0.00996, 0.125, 1.0]
    for row, p in zip(data["comparisons"], found, strict=True):
        row["p_adjusted"] = p
    table = show(data).locator("#comparisons table")
    at = table.locator("thead th").all_inner_texts().index("p (Holm)")
    assert column(table, at) == [p_text(p) for p in found]


def test_the_pareto_front_is_drawn(show: Open) -> None:
    data = sample(3, ("PACS",))
    costs = zip(data["cost"], ((0.1, 80.0), (0.2, 70.0), (0.4, 90.0)), strict=True)
    for row, (time, accuracy) in costs:
        row |= {"seconds_per_step": time, "accuracy": accuracy}
    drawn = chart(show(data), "cost")
    x, y = axis(drawn, "x"), axis(drawn, "y")
    box, place = drawn.locator(".front").bounding_box(), drawn.bounding_box()
    assert box["x"] == pytest.approx(x(100), abs=3)  # from the cheapest, past the second, ...
    assert box["y"] == pytest.approx(y(90), abs=2)  # ... to the best, and on to the right
    assert box["x"] + box["width"] > place["x"] + 0.95 * place["width"]
    path = drawn.locator(".front").get_attribute("d") or ""
    assert re.sub("[^A-Z]", "", path) == "MLHVH"


def test_a_partial_mean_is_marked_and_never_the_best(show: Open) -> None:
    data = sample(2, ("PACS",))
    rows = data["tables"][0]["rows"]
    for row, mean in zip(rows, (99.0, 60.0), strict=True):
        row["cells"] = {c: {"mean": mean, "err": 1.0, "n": 3} for c in row["cells"]}
        row["avg"] = mean
    rows[0]["cells"]["photo"]["partial"] = True
    cells = [[{"mean": 99.0, "err": 1.0, "n": 3, "partial": True}], [None]]
    methods = [{"algorithm": a, "averaging": "swad"} for a in ("ERM", "CORAL")]
    data["matrices"] = [
        {"dataset": "all", "methods": methods, "optimizers": ["fad"], "cells": cells}
    ]
    page = show(data)
    table = page.get_by_role("region", name="PACS", exact=True).locator("table")
    photo, avg = 1 + list(rows[0]["cells"]).index("photo"), 1 + len(rows[0]["cells"])
    for at in (photo, avg):
        assert column(table, at)[0].endswith("*")
        cell = table.locator(f"tbody tr:first-child > :nth-child({at + 1})")
        assert "some targets are missing" in (cell.get_attribute("title") or "")
        assert "best" not in (cell.get_attribute("class") or "")
    assert "best" in (
        table.locator("tbody tr:first-child > :nth-child(2)").get_attribute("class") or ""
    )
    matrix = page.get_by_role("region", name="Optimizers by algorithm: all datasets")
    assert column(matrix.locator("table"), 0) == ["ERM + swad", "CORAL + swad"]
    assert column(matrix.locator("table"), 1) == ["99.0 \u00b1 1.0*", "\u2013"]


def test_long_tables_can_be_filtered_by_what_the_names_leave_out(show: Open) -> None:
    page = show(sample(n_methods=12, datasets=("PACS",)))
    assert not page.locator("#cost label", has_text="dataset").is_visible()  # nothing to choose
    first = page.locator("#results .controls input").first
    first.fill("erm fad")
    rows = page.locator("#results table").first.locator("tbody tr:visible")
    assert rows.locator(".name").all_inner_texts() == ["fad", "fad swad"]
    first.fill("")
    assert rows.count() == 12


def test_learning_curves_answer_the_pointer(show: Open) -> None:
    data = sample()
    page = show(data)
    drawn = chart(page, "curves")
    series = data["curves"][0]["series"]
    x, y = axis(drawn, "x"), axis(drawn, "y")
    step = series[0]["steps"][5]
    page.mouse.move(x(step) + 3, y(series[3]["test"][5]))
    lines = tip(page).splitlines()
    assert lines[0] == f"step {step:,}"
    expected = sorted(((one["test"][5], one["name"]) for one in series), reverse=True)
    assert " ".join(lines[1:]).split() == " ".join(f"{n} {v:.1f}" for v, n in expected).split()
    # The cross stands at the step, the marks at the values.
    cross = drawn.locator(".hover .cross").bounding_box()
    assert abs(cross["x"] + cross["width"] / 2 - x(step)) < 2
    heights = sorted(
        box["y"] + box["height"] / 2
        for box in map(Locator.bounding_box, drawn.locator(".hover .marks").all())
    )
    assert heights == pytest.approx(sorted(y(value) for value, _ in expected), abs=2)
    page.mouse.move(0, 0)
    assert not tip(page)
    # The keyboard does the same, and another target and measure show their own numbers.
    choose(page, "curves", "target", "OfficeHome / sketch")
    choose(page, "curves", "show", "training loss")
    drawn = chart(page, "curves")
    drawn.press("Home")
    drawn.press("ArrowRight")
    other = data["curves"][7]["series"][2]
    assert tip(page).startswith(f"step {other['steps'][1]:,}")
    assert f"{other['loss'][1]:.4g}" in tip(page)
    drawn.press("Escape")
    assert not tip(page)


def test_targets_have_their_unit(show: Open, tmp_path: Path) -> None:
    angles = tuple(map(str, range(0, 90, 15)))
    for trial, target in itertools.product(range(2), ("0", "75")):
        records = [record(step, (target,), lambda d, p: 0.5, angles) for step in (0, 9)]
        one = config((target,), trial, draw=trial, dataset="RotatedDigits")
        write_run(tmp_path / f"{target}-{trial}", one, records)
    page = show(build_report(load_runs(tmp_path)).page_data())
    headings = page.locator("#results thead th").all_inner_texts()
    assert [one.strip("↕ ") for one in headings[1:3]] == ["0°", "75°"]
    assert page.locator("#curves option").all_inner_texts()[:2] == [
        "RotatedDigits / 0°",
        "RotatedDigits / 75°",
    ]
    ticks = chart(page, "domains").locator(".x-ticks text").all_text_contents()
    assert ticks == ["0°", "75°"]
    assert {"0°", "75°"} <= set(page.locator("#sensitivity option").all_inner_texts())


def test_a_name_hides_its_series(show: Open) -> None:
    page = show(sample())
    drawn = chart(page, "curves")
    button = page.locator("#curves .legend button", has_text="CORAL adam")
    assert drawn.locator(".series").count() == len(NAMES)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    drawn = chart(page, "curves")
    assert drawn.locator(".series").count() == len(NAMES) - 1
    drawn.press("End")
    assert "CORAL" not in tip(page)
    assert "fad swad" in tip(page)
    # The choice outlives a change of the measure, and the next press undoes it.
    choose(page, "curves", "show", "training loss")
    assert drawn.locator(".series").count() == len(NAMES) - 1
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert chart(page, "curves").locator(".series").count() == len(NAMES)


def test_a_missing_value_leaves_a_gap(show: Open) -> None:
    data = sample(n_methods=1)
    data["curves"][0]["series"][0] |= {"steps": [0, 1, 2, 3, 4], "test": [1.0, 2.0, None, 4.0, 5.0]}
    path = chart(show(data), "curves").locator(".series .stroke").get_attribute("d")
    assert re.sub("[^A-Z]", "", path) == "MLML"


def test_cost_and_domains_answer_the_pointer(show: Open) -> None:
    data = sample()
    page = show(data)
    row = data["cost"][2]
    assert row["name"] == "sam"
    drawn = chart(page, "cost")
    page.mouse.move(
        axis(drawn, "x")(1e3 * row["seconds_per_step"]), axis(drawn, "y")(row["accuracy"])
    )
    assert tip(page).splitlines()[0] == "sam"
    for number in (
        f"{row['accuracy']:.1f} ± {row['err']:.1f}",
        f"{1e3 * row['seconds_per_step']:.1f}",
        f"{row['memory_gb']:.2f}",
    ):
        assert number in tip(page)
    value = data["tables"][1]["rows"][4]["cells"]["photo"]
    choose(page, "domains", "dataset", "OfficeHome")
    for option in ("bars from zero", "points, enlarged"):
        choose(page, "domains", "axis", option)
        drawn = chart(page, "domains")
        mark = drawn.locator(".series").nth(4).locator(".marks")
        # One path for the four targets, which stand at equal distances; its third mark is meant.
        box = mark.bounding_box()
        center = box["x"] + box["width"] / 2
        label = [b.bounding_box() for b in drawn.locator(".x-ticks text").all()]
        middle = [b["x"] + b["width"] / 2 for b in label]
        page.mouse.move(center + (middle[2] - middle[0]) / 4, axis(drawn, "y")(value["mean"]))
        assert tip(page).split() == [
            "photo",
            "fad",
            f"{value['mean']:.1f}",
            "±",
            f"{value['err']:.1f}",
        ]


def test_sensitivity_chooses_its_axis(show: Open) -> None:
    data = sample()
    for entry in data["sensitivity"]:
        for point in entry["points"]:
            point["hparams"] = dict(reversed(point["hparams"].items()))
    page = show(data)
    points = [p for entry in data["sensitivity"][:7] for p in entry["points"]]

    def marks() -> int:
        paths = (
            chart(page, "sensitivity")
            .locator(".cloud")
            .evaluate_all("all => all.map(p => p.getAttribute('d'))")
        )
        return sum(path.count("M") for path in paths)

    def title() -> str:
        return chart(page, "sensitivity").locator("> text").first.text_content()

    assert title() == "lr (log scale)"  # wherever it is among the hyperparameters
    assert marks() == len(points)
    choose(page, "sensitivity", "target", "photo")
    assert marks() == sum(p["target"] == "photo" for p in points)
    choose(page, "sensitivity", "against", "batch_size")
    assert title() == "batch_size"  # 8 to 45: not wide
    choose(page, "sensitivity", "against", "nonlinear")
    assert chart(page, "sensitivity").locator(".x-ticks text").all_text_contents() == [
        "false",
        "true",
    ]
    choose(page, "sensitivity", "against", "resnet_dropout")
    drawn = chart(page, "sensitivity")
    photo = [p for p in points if p["target"] == "photo"]
    highest = max(photo, key=lambda p: p["accuracy"])
    x, y = axis(drawn, "x"), axis(drawn, "y")
    page.mouse.move(x(highest["hparams"]["resnet_dropout"]), y(highest["accuracy"]))
    assert f"{highest['accuracy']:.1f}" in tip(page)
    assert f"{highest['choice']} trial {highest['trial']}" in " ".join(tip(page).split())


def test_a_thinned_figure_says_so(
    show: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "POINTS", 2)
    for name, draws in {"adam": 2, "sgd": 5}.items():
        for draw in range(draws):
            one = config(("photo",), draw=draw, optimizer={"name": name, "lr": 0.1**draw})
            write_run(tmp_path / f"{name}-{draw}", one, [record(0, ("photo",), lambda d, p: 0.5)])
    page = show(build_report(load_runs(tmp_path)).page_data())
    caption = page.locator("#sensitivity figcaption").inner_text()
    assert caption.endswith("Hover for its hyperparameters. Of sgd, one run in 3 is drawn.")


def test_comparisons_show_what_may_be_chance(show: Open) -> None:
    data = sample()
    rows = data["comparisons"]
    page = show(data)
    table = page.locator("#comparisons table")
    assert column(table, 0) == [f"{row['a']} − {row['b']}" for row in rows]
    assert column(table, 2) == [points_text(row["difference"]).replace("-", "−") for row in rows]
    low, high = (points_text(rows[0][key]) for key in ("seeds_low", "seeds_high"))
    assert column(table, 3)[0] == f"{low} to {high}, 3 seeds".replace("-", "−")
    assert column(table, 5) == [row["verdict"] for row in rows]
    filled = table.locator("tbody .plot").evaluate_all(
        "all => all.map(c => !!c.querySelector('.marks'))"
    )
    assert filled == [row["verdict"] == "significant" for row in rows]
    assert len(set(filled)) == 2
    first = rows[0]
    reach = f"{points_text(first['targets_low'])} to {points_text(first['targets_high'])}"
    assert table.locator("thead th").last.inner_text().startswith("CI, targets")
    assert column(table, 6)[0] == reach.replace("-", "−")
    # In pixels, the intervals' lengths are as the numbers.
    boxes = [stroke.bounding_box()["width"] for stroke in table.locator(".plot .stroke").all()]
    lengths = [row["seeds_high"] - row["seeds_low"] for row in rows]
    scale = (boxes[0] - 1.75) / lengths[0]
    assert [box - 1.75 for box in boxes] == pytest.approx(
        [scale * length for length in lengths], abs=1.5
    )


def test_two_equal_methods_are_drawn_at_zero(show: Open) -> None:
    gone = dict.fromkeys(("low", "high", "seeds_low", "seeds_high", "decided_over", "p_adjusted"))
    data = sample(2)
    data["comparisons"][0] |= gone | {"difference": 0.0, "verdict": "no interval"}
    table = show(data).locator("#comparisons table")  # an axis without a length would complain
    assert column(table, 2) == ["0.0"]
    assert table.locator(".plot .hollow").bounding_box() is not None


@pytest.mark.parametrize(
    "change",
    [
        {"targets_low": None, "targets_high": None, "low": -1.0, "high": 2.0},  # one target
        {"decided_over": "targets", "seeds_low": None, "seeds_high": None, "seeds": None},
    ],
)
def test_an_interval_over_targets_is_shown_once_and_only_where_it_is_one(
    show: Open, change: dict[str, Any]
) -> None:
    data = sample()
    for row in data["comparisons"]:
        row |= change
    headings = show(data).locator("#comparisons thead th").all_inner_texts()
    assert len([one for one in headings if "CI" in one]) == 1


def test_flatness_is_left_out_until_it_was_measured(show: Open) -> None:
    page = show(sample())
    assert "Flatness" in page.locator("nav").inner_text()
    chart(page, "flatness").press("Home")
    assert "eigenvalue 1" in tip(page)
    assert "45" in tip(page)
    assert "Flatness" not in show(sample() | {"flatness": []}).locator("body").inner_text()


def measurement(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {
        "run": f"runs/{name}",
        "name": name,
        "dataset": "PACS",
        "measured": "train",
        "conditions": ["PACS", "photo (train)", 1024],
        "lambda_max": value,
        "trace": 4 * value,
        "trace_err": 0.125,
        "zeroth": value / 100,
        "first": value / 50,
        "fad": value / 75,
        "rho": 0.05,
        "alpha": 0.5,
        "loss": value / 1000,
        "images": 1234,
        "spectrum": [value, value / 2, value / 50],
        **more,
    }


def test_flatness_shows_what_may_be_compared(show: Open, tmp_path: Path) -> None:
    target = {"measured": "sketch", "conditions": ["PACS", "sketch (all)", 300]}
    rows = [
        measurement("sgd", 60.0, **target),
        measurement("fad", 70.0, **target),
        measurement("sgd", 80.0),
        measurement("fad", 20.0),
        measurement("fad", 30.0, run="runs/fad-1", rho=0.1),
    ]
    page = show(sample() | {"flatness": rows})

    def table() -> tuple[list[str], list[str], list[list[str]]]:
        found = page.locator("#flatness table")
        heads = [text.strip() for text in found.locator("thead th").all_inner_texts()]
        best = found.locator("td.best").all_inner_texts()
        return heads, best, [column(found, i) for i in range(len(heads))]

    heads, best, cells = table()
    assert heads == [
        "method", "λ_max", "trace", "R0", "R1", "R_FAD", "ρ", "α", "loss", "images",
        "run",
    ]  # fmt: skip
    # What runs were trained on comes first, wherever it is in the data.
    menu = page.locator("#flatness .controls option").all_inner_texts()
    assert menu == ["train", "sketch"]
    assert cells[0] == ["sgd", "fad", "fad"]
    assert cells[2] == ["320 ± 0.13", "80 ± 0.13\n(best)", "120 ± 0.13"]
    assert cells[3] == ["0.8", "0.2", "0.3"]  # within other radii: none is best
    assert cells[8:10] == [["0.08", "0.02", "0.03"], 3 * ["1234"]]
    assert len(best) == 2
    assert "± is the standard error of the trace" in page.locator("#flatness").inner_text()
    assert chart(page, "flatness").locator(".series").count() == 3
    keep(page, "flatness", tmp_path)
    # The target's, in the table and in the figure.
    choose(page, "flatness", "measured on", "sketch")
    heads, best, cells = table()
    assert heads[-2:] == ["measured on", "run"]
    assert cells[-2] == ["sketch", "sketch"]
    assert [text.split()[0] for text in best] == ["60", "240", "0.6", "1.2", "0.8"]
    drawn = chart(page, "flatness")
    assert drawn.locator(".series").count() == 2
    drawn.press("Home")
    assert "70" in tip(page)
    assert "80" not in tip(page)
    # Other images: no contest, and the page says so.
    rows[0]["conditions"] = ["PACS", "sketch (all)", 299]
    page = show(sample() | {"flatness": rows[:2]})
    assert page.locator("#flatness td.best").count() == 0
    assert "Measured under different conditions" in page.locator("#flatness").inner_text()


def test_ranks_of_eigenvalues_are_whole(show: Open) -> None:
    for top in (1, 2, 3, 50):
        rows = [measurement(name, 9.0, spectrum=[9.0 / k for k in range(1, top + 1)])
                for name in ("sgd", "fad")]  # fmt: skip
        drawn = chart(show(sample() | {"flatness": rows}), "flatness")
        ticks = drawn.locator(".x-ticks text").all_text_contents()
        assert ticks == [str(int(tick)) for tick in ticks]
        assert top > 3 or ticks == [str(rank) for rank in range(1, top + 1)]
        assert len(ticks) > 2 or top < 3


def test_provenance_names_command_versions_and_problems(show: Open) -> None:
    data = sample()
    text = show(data).locator("#provenance").inner_text()
    for part in (data["command"], data["made"], *data["versions"].values(), *data["problems"]):
        assert part in text
    assert "training-domain validation" in text


LUMINANCE = """() => {
  const light = (colour) => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const marks = [...document.querySelectorAll("#curves .legend .marks")];
  return {
    page: light(getComputedStyle(document.body).backgroundColor),
    text: [...document.querySelectorAll("p, td, th, .err")]
      .map((node) => light(getComputedStyle(node).color)),
    marks: marks.map((mark) => light(
      getComputedStyle(mark)[mark.classList.contains("open") ? "stroke" : "fill"])),
  };
}"""


def test_light_and_dark(show: Open, tmp_path: Path) -> None:
    def check(page: Page, dark: bool) -> None:
        seen = page.evaluate(LUMINANCE)
        assert (seen["page"] < 0.1) == dark

        def contrast(value: float) -> float:
            high, low = max(value, seen["page"]), min(value, seen["page"])
            return (high + 0.05) / (low + 0.05)

        # The bars of WCAG: text, and what figures are read by.
        assert min(map(contrast, seen["text"])) >= 4.5
        assert min(map(contrast, seen["marks"])) >= 3
        assert len(set(seen["marks"])) == 7

    for scheme in ("light", "dark"):
        page = show(sample(), color_scheme=scheme)
        check(page, dark=scheme == "dark")
        keep(page, scheme, tmp_path)
        page.locator("#theme").click()
        check(page, dark=scheme != "dark")
        page.emulate_media(media="print")
        check(page, dark=False)
        assert not page.locator("#theme, .controls").first.is_visible()


def test_methods_look_as_in_every_other_figure(show: Open) -> None:
    crowd = sample(len(COLOURS) - len(KNOWN), ("PACS",))
    page = show(crowd, color_scheme="light")
    drawn = page.locator("#curves .legend button:not(.tool)").evaluate_all(
        """all => all.map((button) => [button.title,
          getComputedStyle(button.querySelector(".stroke")).stroke,
          button.querySelector(".marks").getAttribute("d"),
          button.querySelector(".marks").classList.contains("open"),
          getComputedStyle(button.querySelector(".marks")).fill])"""
    )
    wanted = looks(name for name, *_ in drawn)
    for name, colour, _, hollow, inside in drawn:
        channels = (int(wanted[name].colour[i : i + 2], 16) for i in (1, 3, 5))
        assert colour == f"rgb({', '.join(map(str, channels))})"
        assert hollow == wanted[name].hollow == (inside != colour)
    assert len({colour for _, colour, *_ in drawn}) == len(drawn)
    known = [shape for name, _, shape, *_ in drawn if name in KNOWN]
    assert len(set(known)) == len(known) == 5
    assert any(hollow for *_, hollow, _ in drawn)


@pytest.mark.parametrize("width", [390, 1280])
def test_a_table_says_that_it_scrolls(show: Open, width: int, tmp_path: Path) -> None:
    data = sample()
    data["comparisons"][1] |= {"verdict": "statistically tied", "p_adjusted": 0.0496}  # the longest
    page = show(data, viewport={"width": width, "height": 844})
    keep(page, str(width), tmp_path)
    comparisons = page.get_by_role("region", name="comparisons", exact=True).locator("xpath=..")
    assert ("wide" in (comparisons.get_attribute("class") or "")) == (width == 390)
    for inner in page.locator(".scroll").all():
        hint = inner.locator("xpath=following-sibling::p")
        wider = inner.evaluate("t => t.scrollWidth > t.clientWidth + 1")
        assert hint.is_visible() == wider
    inner = page.get_by_role("region", name="PACS", exact=True)
    outer = inner.locator("xpath=..")
    if width == 390:
        assert "ended" not in (outer.get_attribute("class") or "")
        inner.evaluate("t => { t.scrollLeft = 10000; }")
        expect(outer).to_have_class(re.compile("ended"))
    else:
        assert "wide" not in (outer.get_attribute("class") or "")


def test_a_phone_never_scrolls_sideways(show: Open, tmp_path: Path) -> None:
    for name, data in {"phone": sample(), "hostile": hostile()}.items():
        page = show(data, **PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        if name == "phone":
            keep(page, name, tmp_path)
        for drawn in page.locator(".chart svg").all():
            drawn.focus()
            drawn.press("End")
            if tip(page):  # a chart whose values were all lost has none
                box = page.locator("#tip").bounding_box()
                assert 0 <= box["x"] <= 360 - box["width"]
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    table = page.locator("#results .scroll").nth(1)
    first = table.locator("tbody th").first
    before = first.bounding_box()["x"]
    assert table.evaluate("t => { t.scrollLeft = 150; return t.scrollLeft; }") == 150
    assert first.bounding_box()["x"] == before
    # Turned on its side, the charts are drawn anew.
    page.set_viewport_size({"width": 740, "height": 360})
    drawn = page.locator(".chart svg").first
    expect(drawn).to_have_attribute("viewBox", re.compile(r"^0 0 [67]\d\d"))


def test_focus_is_visible_and_motion_is_optional(show: Open) -> None:
    page = show(sample(), reduced_motion="reduce")
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.series')).transitionDuration")
        == "0s"
    )
    for _ in range(3):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


TIMES = """() => {
  const timed = (act) => {
    const from = performance.now();
    act();
    return performance.now() - from;
  };
  const every = (id) => [...document.querySelectorAll(`#${id} .tool`)]
    .find((button) => button.textContent === "all").click();
  const move = (id) => {
    const svg = document.querySelector(`#${id} .chart svg`), box = svg.getBoundingClientRect();
    for (let i = 0; i < 20; i++) {
      const place = { clientX: box.left + 60 + 10 * i, clientY: box.top + 90 };
      svg.dispatchEvent(new PointerEvent("pointermove", place));
    }
  };
  return ["curves", "sensitivity"]
    .flatMap((id) => [timed(() => every(id)), timed(() => move(id)) / 20]);
}"""


def test_a_crowd_is_quick_and_starts_with_the_best(show: Open) -> None:
    data = sample(n_methods=40, datasets=("PACS",), n_steps=60, n_points=50)
    page = show(data)
    drawn = chart(page, "curves")
    names = page.locator("#curves .legend button:not(.tool)[aria-pressed=true]").all_inner_texts()
    ranked = sorted(data["curves"][0]["series"], key=lambda one: max(one["val"]), reverse=True)
    assert set(names) == {one["name"] for one in ranked[:8]}
    milliseconds = page.evaluate(TIMES)
    print("redraw and hover, ms:", [round(value, 1) for value in milliseconds])
    assert max(milliseconds) < 500  # some ten times what an idle core needs
    assert drawn.locator(".series").count() == 40
    assert page.locator("#sensitivity .cloud").count() == 40

"""Measurements side by side: what may be compared, what is drawn, what the page is given."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steppe.curvature.results import Flatness, Trace
from steppe.errors import UserError
from steppe.measure.stored import (
    DensityCurve,
    Measured,
    Sample,
    Spectrum,
    Weights,
    save_measurement,
)
from steppe.reports import build_report, compare, load_runs
from steppe.reports.curvature import Comparison, Spread, comparison_text
from steppe.reports.measured import described, measured_table, remarks
from steppe.reports.palette import looks
from steppe.reports.render import to_terminal
from steppe.reports.spectra import check_format, draw, draw_measured, make_figure
from tests.reports.trees import config, record, write_run

MEASURED = Measured(
    name="train",
    dataset="PACS",
    domains=(Sample("art_painting", "train", 50, 90), Sample("photo", "train", 50, 80)),
    weights=Weights("last", 300, averaged=False),
    loss_function="cross-entropy",
    parameters=1000,
    precision="float32",
    loss=0.1,
    gradient_norm=1e-3,
    eigenvalues=Spectrum((40.0, 10.0, 2.0), (1e-4, 2e-4, 3e-4), 1e-3, converged=True),
    trace=Trace(100.0, 1.5, 96.0, 104.0, 10, 0.02, converged=True),
    flatness=Flatness(
        0.1, 0.5, 0.2, 0.4, 0.3, 0.1, 0.3, 0.2, lambda_max=40.0, converged=True, passes=9
    ),
    density=None,
    batch_size=64,
    seed=0,
    products=30,
    passes=31,
    seconds=3.0,
    date="2026-11-15T12:00:00Z",
    device="cpu",
    versions={"steppe": "0.1.0"},
)


def made(values: tuple[float, ...] = (40.0, 10.0, 2.0), trace: float = 100.0, **more: Any) -> Any:
    return replace(
        MEASURED,
        eigenvalues=replace(
            MEASURED.eigenvalues, values=values, residuals=tuple(1e-4 for _ in values)
        ),
        trace=replace(MEASURED.trace, value=trace),
        **more,
    )


def write(
    root: Path,
    name: str,
    optimizer: str,
    *found: Measured,
    trial: int = 0,
    targets: tuple[str, ...] = ("sketch",),
    lr: float = 1e-3,
    **more: Any,
) -> Path:
    chosen = {"name": optimizer, "lr": lr}
    records = [record(300, targets, lambda d, p: 0.5)]
    folder = write_run(root / name, config(targets, trial, optimizer=chosen, **more), records)
    for one in found:
        (folder / "curvature").mkdir(exist_ok=True)
        save_measurement(folder, one)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, "sgd", "sgd", made((90.0, 30.0, 6.0), 300.0))
    write(tmp_path, "fad-0", "fad", made((40.0, 10.0, 2.0), 100.0))
    write(tmp_path, "fad-1", "fad", made((20.0, 14.0, 4.0), 130.0), trial=1)
    return tmp_path


def test_means_and_errors_by_method(tree: Path) -> None:
    found = compare(load_runs(tree).runs)
    fad, sgd = found.methods
    assert (fad.row.name, len(fad.runs), sgd.row.name, len(sgd.runs)) == ("fad", 2, "sgd", 1)
    assert fad.spectrum == [30.0, 12.0, 3.0]
    # As the tables of accuracies: the population's deviation over the root of n.
    assert (fad.spread("lambda_max").mean, fad.spread("lambda_max").err) == (
        30.0,
        pytest.approx(10 / np.sqrt(2)),
    )
    assert (fad.spread("trace").mean, fad.spread("trace").err) == (
        115.0,
        pytest.approx(15 / np.sqrt(2)),
    )
    # Of one run, only the trace is an estimate.
    assert sgd.spread("lambda_max") == Spread(90.0, None)
    assert sgd.spread("trace") == Spread(300.0, 1.5)
    plain = json.loads(json.dumps(found.to_json()))
    assert [m["name"] for m in plain["methods"]] == ["fad", "sgd"]
    assert plain["methods"][0]["trace"]["mean"] == 115.0
    assert [len(m["runs"]) for m in plain["methods"]] == [2, 1]
    assert found.about == (
        "cross-entropy on 100 training images of art_painting, photo (PACS); last weights "
        "after step 300, float32"
    )
    assert comparison_table(found).row_count == 2


def comparison_table(found: Comparison) -> Any:
    return to_terminal(comparison_text(found))


def flat(zeroth: float, first: float, rho: float = 0.05, **more: Any) -> Flatness:
    return replace(MEASURED.flatness, zeroth=zeroth, first=first, rho=rho, **more)


def test_flatness_by_method(tmp_path: Path) -> None:
    write(tmp_path, "sgd", "sgd", made((9.0,), 3.0, flatness=flat(0.5, 0.9), loss=0.25))
    write(tmp_path, "fad-0", "fad", made((4.0,), 1.0, flatness=flat(0.1, 0.3)))
    write(tmp_path, "fad-1", "fad", made((2.0,), 1.0, flatness=flat(0.3, 0.5)), trial=1)
    found = compare(load_runs(tmp_path).runs)
    fad, sgd = found.methods
    assert (found.rho, found.notes) == (0.05, ())
    assert (fad.spread("zeroth").mean, fad.spread("zeroth").err) == pytest.approx(
        (0.2, 0.1 / np.sqrt(2))
    )
    assert (fad.spread("first").mean, fad.spread("first").err) == pytest.approx(
        (0.4, 0.1 / np.sqrt(2))
    )
    assert (sgd.spread("zeroth").mean, sgd.spread("zeroth").err, sgd.spread("loss").mean) == (
        0.5,
        None,
        0.25,
    )
    table = comparison_table(found)
    headings = [str(column.header) for column in table.columns]
    assert headings[-3:] == ["R0", "R1", "loss"]
    assert str(table.caption).strip().endswith("; R0 and R1 within ρ = 0.05")
    cells = [[str(cell) for cell in column.cells] for column in table.columns[-3:]]
    assert cells == [["0.200 ± 0.071", "0.5"], ["0.400 ± 0.071", "0.9"], ["0.1 ± 0", "0.25"]]
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["rho"] == 0.05
    assert plain["methods"][1]["zeroth"] == {"mean": 0.5, "err": None}
    assert plain["methods"][1]["runs"][0]["first"] == 0.9


@pytest.mark.parametrize(
    ("mean", "err", "text"),
    [
        (934.8, 187.2, "935 ± 187"),
        (0.0512, 0.0131, "0.051 ± 0.013"),
        (58.52, 7.7, "58.5 ± 7.7"),
        (0.1, 8e-18, "0.1 ± 8e-18"),
        (0.1, 0.0, "0.1 ± 0"),
        (0.1, float("nan"), "0.1 ± nan"),
        (12345.6, None, "1.235e+04"),
    ],
)
def test_digits_of_an_error(mean: float, err: float | None, text: str) -> None:
    assert str(Spread(mean, err)) == text


def test_flatness_at_other_radii_is_not_compared(tmp_path: Path) -> None:
    write(tmp_path, "sgd", "sgd", made((9.0,), 3.0, flatness=flat(0.5, 0.9)))
    write(tmp_path, "fad", "fad", made((4.0,), 1.0, flatness=flat(0.1, 0.3, rho=0.2)))
    found = compare(load_runs(tmp_path).runs)
    (note,) = found.notes
    assert "R0 and R1 are not compared, because they were measured at ρ = 0.05, 0.2" in note
    assert "--rho 0.05" in note
    assert not any("R0" in str(column.header) for column in comparison_table(found).columns)
    plain = found.to_json()
    assert plain["rho"] is None
    assert "zeroth" not in plain["methods"][0]
    assert [m["runs"][0]["rho"] for m in plain["methods"]] == [0.2, 0.05]


ART, PHOTO = MEASURED.domains


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"domains": (replace(PHOTO, images=100),)}, "domains: photo (train) instead of art"),
        ({"domains": (ART, replace(PHOTO, part="all"))}, "domains"),
        ({"domains": (ART, replace(PHOTO, images=49))}, "images: 99 instead of 100"),
        ({"precision": "float64"}, "precision: float64 instead of float32"),
        ({"loss_function": "hinge"}, "loss: hinge instead of cross-entropy"),
        ({"dataset": "VLCS"}, "dataset: VLCS instead of PACS"),
        ({"values": (40.0, 10.0)}, "top: 2 instead of 3"),
        ({"parameters": 1001}, "parameters: 1001 instead of 1000"),
        ({"seed": 1}, "seed of the images: 1 instead of 0"),
    ],
)
def test_what_was_measured_differently_is_refused(tmp_path, changes, named) -> None:
    write(tmp_path, "a", "sgd", made())
    write(tmp_path, "b", "fad", made(**changes))
    with pytest.raises(UserError, match=rf"differently from .*a \({re.escape(named)}"):
        compare(load_runs(tmp_path).runs)


def test_the_seed_is_no_matter_where_all_images_are_taken(tmp_path: Path) -> None:
    every = (replace(ART, of=ART.images), replace(PHOTO, of=PHOTO.images))
    for name, seed in (("sgd", 0), ("fad", 1)):
        write(tmp_path, name, name, made(domains=every, seed=seed))
    assert len(compare(load_runs(tmp_path).runs).methods) == 2
    # One image is left out: which, the seed decides.
    write(tmp_path, "adam", "adam", made(domains=(every[0], replace(PHOTO, of=51))))
    with pytest.raises(UserError, match="seed of the images"):
        compare(load_runs(tmp_path).runs)


def test_notes_say_what_a_mean_mixes_and_what_has_not_converged(tree: Path) -> None:
    for i in range(2):
        hparams = {"hparams": {"lr": 0.1, "data_seed": i}}
        write(tree, f"adam-{i}", "adam", made(), trial=i, seed=i, imported=hparams)
    assert compare(load_runs(tree).runs).notes == ()  # seeds are no difference
    write(tree, "sgd-1", "sgd", made(), lr=1e-2, steps=600, seed=7)
    loose = replace(MEASURED.eigenvalues, converged=False)
    rising = replace(MEASURED.flatness, converged=False)
    unsure = replace(MEASURED, eigenvalues=loose, flatness=rising)
    write(tree, "sgd-2", "sgd", unsure, backbone="resnet50")
    noisy = replace(MEASURED, trace=replace(MEASURED.trace, converged=False))
    for trial in range(7):
        write(tree, f"sam-{trial}", "sam", noisy, trial=trial)
    found = compare(load_runs(tree).runs)
    named = ", ".join(f"{tree}/sam-{trial}" for trial in range(5))
    assert found.notes == (
        "sgd: mean over runs that differ in backbone, steps, lr",
        f"eigenvalues did not converge in 1 of 14 measurements: {tree}/sgd-2",
        f"the trace did not converge in 7 of 14 measurements: {named} and 2 more",
        f"flatness did not converge in 1 of 14 measurements: {tree}/sgd-2",
    )
    assert found.to_json()["notes"] == list(found.notes)


def test_runs_of_one_target_are_chosen_from_a_sweep(tmp_path: Path) -> None:
    held_out = {"photo": (ART, replace(PHOTO, domain="sketch")), "sketch": (ART, PHOTO)}
    for target, sources in held_out.items():
        for name in ("sgd", "fad"):
            found = made((7.0 if target == "photo" else 5.0, 2.0, 1.0), domains=sources)
            write(tmp_path, f"{name}-{target}", name, found, targets=(target,))
    both = (replace(ART, images=100),)
    write(tmp_path, "adam", "adam", made(domains=both), targets=("photo", "sketch"))
    runs = load_runs(tmp_path).runs
    with pytest.raises(UserError, match="; choose runs with one target: --target photo.$"):
        compare(runs)
    for target, value in (("photo", 7.0), ("sketch", 5.0)):
        chosen = compare(runs, targets=[target])
        assert [(m.row.name, m.spread("lambda_max").mean) for m in chosen.methods] == [
            ("fad", value),
            ("sgd", value),
        ]
    # Exactly these: one run, of which there is nothing to compare.
    with pytest.raises(UserError, match="at least two runs, got 1"):
        compare(runs, targets=["sketch", "photo"])
    with pytest.raises(UserError, match="targets cartoon; .* photo or photo, sketch or sketch"):
        compare(runs, targets=["cartoon"])
    # What was measured alike is compared, but not in silence.
    for run in runs:
        save_measurement(run.path, made(name="cartoon", domains=both))
    (note, _) = compare(runs, [both[0].domain]).notes
    assert note == "fad: mean over runs that differ in targets"
    # Several targets are named one by one; with the same targets, the advice is no help.
    for name in ("x", "y"):
        several = made(domains=both)
        write(tmp_path, name, name, several, targets=("photo", "a b"))
    with pytest.raises(UserError, match="the same targets: --target 'a b' --target photo"):
        compare(
            [run for run in load_runs(tmp_path).runs if run.path.name in ("x", "y", "sgd-photo")]
        )
    write(tmp_path, "z", "z", made(), targets=("photo", "a b"))
    with pytest.raises(UserError, match="with the same options.$"):
        compare([run for run in load_runs(tmp_path).runs if run.path.name in ("x", "y", "z")])


def test_averaged_weights_are_named_only_where_all_are(tmp_path: Path) -> None:
    averaged = made(weights=Weights("last", 300, averaged=True))
    write(tmp_path, "a", "adam", averaged)
    write(tmp_path, "b", "fad", averaged)
    assert "last weights after step 300, averaged, " in compare(load_runs(tmp_path).runs).about
    write(tmp_path, "c", "sgd", made())
    found = compare(load_runs(tmp_path).runs)
    assert not found.methods[-1].runs[0].measured.weights.averaged
    assert "last weights after step 300, float32" in found.about
    assert str(comparison_table(found).title) == f"Hessian of the {found.about}"


OVER_RUNS = "standard error over runs"


@pytest.mark.parametrize(
    ("chosen", "errors"),
    [
        (("fad-0", "sgd"), "standard error of the trace estimate"),
        (("fad-0", "fad-1"), OVER_RUNS),
        (("fad-0", "fad-1", "sgd"), f"{OVER_RUNS}; for a single run, that of its trace estimate"),
    ],
)
def test_table_and_figure_say_what_errors_are(tree: Path, chosen, errors) -> None:
    found = compare([run for run in load_runs(tree).runs if run.path.name in chosen])
    assert found.to_json()["errors"] == errors
    assert str(comparison_table(found).caption).strip() == f"±: {errors}; R0 and R1 within ρ = 0.1"
    assert f"\nerror bars: {errors}" in make_figure(found).get_suptitle()


@pytest.mark.parametrize("top", [1, 2, 4, 10, 25, 50])
def test_every_method_has_markers_and_ranks_are_whole(tmp_path: Path, top: int) -> None:
    for i in range(7):
        spectrum = tuple((50.0 + i) / (k + 1) for k in range(top))
        for trial in range(2 if i == 0 else 1):
            write(tmp_path, f"{i}-{trial}", f"m{i}", made(spectrum), trial=trial)
    axes = make_figure(compare(load_runs(tmp_path).runs)).axes[0]
    named = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert len(named) == 7
    for line in named:
        first, step = line.get_markevery()
        marked = len(line.get_xdata()[first::step])
        assert marked >= min(top, 8)
    if top == 1:  # the two runs behind a mean, too, are seen
        assert all(line.get_marker() not in ("", "None") for line in axes.lines)
    assert axes.get_xlim() == (0.5, top + 0.5)
    ticks = [tick for tick in axes.get_xticks() if 0.5 <= tick <= top + 0.5]
    assert ticks
    assert all(tick == int(tick) for tick in ticks)
    if top <= 4:
        assert ticks == list(range(1, top + 1))


def test_runs_without_a_measurement_are_listed_with_the_command(tree: Path) -> None:
    write(tree, "a b", "adam")
    with pytest.raises(UserError) as error:
        compare(load_runs(tree).runs)
    assert str(error.value) == (
        f"1 run was not measured:\n  {tree}/a b\n"
        f"Measure each of them, for example: steppe curvature '{tree}/a b'"
    )
    with pytest.raises(UserError, match="4 runs were not measured with --domain sketch") as error:
        compare(load_runs(tree).runs, ["sketch"])
    assert f"steppe curvature '{tree}/a b' --domain sketch" in str(error.value)
    for i in range(9):
        write(tree, f"more-{i}", "adam")
    with pytest.raises(UserError, match="10 runs were not measured:\n(  .*\n){5}  and 5 more\n"):
        compare(load_runs(tree).runs)
    with pytest.raises(UserError, match="needs at least two"):
        compare(load_runs(tree / "sgd").runs)


def test_domains_and_weights_are_chosen(tmp_path: Path) -> None:
    both = (Sample("cartoon", "all", 10, 10), Sample("sketch", "all", 10, 10))
    target = made((7.0, 3.0, 1.0), name="cartoon+sketch", domains=both)
    best = made((5.0, 3.0, 1.0), name="train@best", weights=Weights("best", 100, averaged=True))
    for name in ("sgd", "fad"):
        write(tmp_path, name, name, made(), target, best)
    runs = load_runs(tmp_path).runs
    for domains in (["cartoon", "sketch"], ["sketch", "cartoon"]):
        assert compare(runs, domains).methods[0].spread("lambda_max").mean == 7.0
    assert compare(runs, which="best").methods[0].spread("lambda_max").mean == 5.0
    assert compare(runs).methods[0].spread("lambda_max").mean == 40.0
    with pytest.raises(UserError, match="--domain sketch --which best"):
        compare(runs, ["sketch"], "best")
    assert described(target).startswith("cross-entropy on 20 images of cartoon, sketch")
    assert described(best).endswith("best weights after step 100, averaged, float32")


def test_the_figure(tree: Path, tmp_path: Path) -> None:
    found = compare(load_runs(tree).runs)
    figure = make_figure(found)
    spectra, largest, traces = figure.axes
    # Two thin lines and their mean for fad, one line for sgd; markers on what the legend names.
    lines = [tuple(line.get_ydata()) for line in spectra.lines]
    assert lines == [(40, 10, 2), (20, 14, 4), (30, 12, 3), (90, 30, 6)]
    assert [line.get_linewidth() > 1 for line in spectra.lines] == [False, False, True, True]
    fad, sgd = looks(["fad", "sgd"]).values()
    assert [line.get_color() for line in spectra.lines] == [*3 * [fad.colour], sgd.colour]
    assert [spectra.lines[i].get_marker() for i in (2, 3)] == [fad.marker, sgd.marker]
    assert spectra.get_yscale() == "log"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["fad (mean of 2 runs)", "sgd"]
    for axes, means, errors in ((largest, [30, 90], 1), (traces, [115, 300], 2)):
        assert [bar.get_width() for bar in axes.patches] == means
        assert len(axes.containers) - len(means) == errors
    assert [tick.get_text() for tick in largest.get_yticklabels()] == ["fad", "sgd"]
    # Not where a logarithm does not exist, and not where it would not help.
    for values in ((40.0, 10.0, -2.0), (9.0, 8.0, 7.0)):
        others = tmp_path / f"{values[2]}"
        write(others, "a", "sgd", made(values))
        write(others, "b", "fad", made((9.0, 8.0, 7.0)))
        assert make_figure(compare(load_runs(others).runs)).axes[0].get_yscale() == "linear"


CURVE = DensityCurve((-1.0, 0.0, 20.0, 40.0), (1e-3, 2.0, 1e-4, 1e-5), probes=4, steps=80)


def test_densities_are_drawn_beside_the_spectra(tmp_path: Path) -> None:
    write(tmp_path, "sgd", "sgd", made((90.0, 30.0, 6.0)))
    write(tmp_path, "fad-0", "fad", made(density=CURVE))
    write(tmp_path, "fad-1", "fad", made(density=CURVE), trial=1)
    _, density, _, _ = make_figure(compare(load_runs(tmp_path).runs)).axes
    assert [tuple(line.get_xdata()) for line in density.lines] == 2 * [CURVE.grid]
    assert [tuple(line.get_ydata()) for line in density.lines] == 2 * [CURVE.values]
    assert {line.get_color() for line in density.lines} == {looks(["fad"])["fad"].colour}
    assert (density.get_xlabel(), density.get_yscale()) == ("eigenvalue", "log")


def test_one_measurement_is_drawn_with_its_density(tmp_path: Path) -> None:
    for name, measured, drawn in (
        ("with.svg", made(density=CURVE), True),
        ("without.svg", made(), False),
    ):
        draw_measured(measured, tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "rank" in text
        assert ("spectral density" in text) is drawn


def test_pictures(tree: Path, tmp_path: Path) -> None:
    write(tree, "odd", "a $name$ <of> _someone's own, and very long", made())
    found = compare(load_runs(tree).runs)
    for name, magic in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.PDF", b"%PDF")):
        draw(found, tmp_path / name)
        data = (tmp_path / name).read_bytes()
        assert data.startswith(magic)
        draw(found, tmp_path / name)
        assert (tmp_path / name).read_bytes() == data
    text = (tmp_path / "a.svg").read_text()
    assert "fad (mean of 2 runs)" in text
    assert "a $name$ &lt;of&gt; _someone" in text
    for name in ("a.jpg", "a"):
        with pytest.raises(UserError, match=r"end in one of \.svg, \.png, \.pdf"):
            check_format(tmp_path / name)


def test_the_page_gets_every_measurement_and_the_report_names_damage(tree: Path) -> None:
    target = made(name="sketch", domains=(Sample("sketch", "all", 9, 9),))
    write(tree, "two", "sam", made((3.0, 2.0, 1.0)), target)
    write(tree, "none", "adam")
    broken = write(tree, "broken", "adam", made())
    (broken / "curvature/train.json").write_text("{")
    (broken / "curvature/config.json").write_text("{}")  # of a domain called config: no run
    report = build_report(load_runs(tree))
    assert len(report.selected.runs) == 6
    (problem,) = [p for p in report.problems if "curvature" in p]
    assert "curvature/" in problem
    assert "is damaged" in problem
    rows = report.page_data()["flatness"]
    shown = [(row["name"], row["measured"], row["lambda_max"], row["trace"]) for row in rows]
    assert shown == [
        ("fad", "train", 40.0, 100.0),
        ("fad", "train", 20.0, 130.0),
        ("sam", "sketch", 40.0, 100.0),
        ("sam", "train", 3.0, 100.0),
        ("sgd", "train", 90.0, 300.0),
    ]
    assert rows[0] | {"run": "", "conditions": []} == {
        "run": "",
        "conditions": [],
        "name": "fad",
        "dataset": "PACS",
        "measured": "train",
        "images": 100,
        "loss": 0.1,
        "lambda_max": 40.0,
        "trace": 100.0,
        "trace_err": 1.5,
        "zeroth": 0.2,
        "first": 0.4,
        "fad": 0.3,
        "rho": 0.1,
        "alpha": 0.5,
        "spectrum": [40.0, 10.0, 2.0],
    }
    assert rows[0]["conditions"] == rows[1]["conditions"] != rows[2]["conditions"]


def test_a_measurement_in_words() -> None:
    columns = [[str(cell) for cell in column.cells] for column in measured_table(MEASURED).columns]
    lines = dict(zip(columns[0], zip(columns[1], columns[2], strict=True), strict=True))
    assert lines["largest eigenvalue λ_max"] == ("40", "residual 1.0e-04")
    assert lines["trace"] == ("100", "± 1.5; 95% CI 96 to 104")
    assert lines["R0 (ρ = 0.1)"] == ("0.2", "one step finds 0.1, 50% of it")
    assert lines["R1 (ρ = 0.1)"] == ("0.4", "one step finds 0.3, 75% of it")
    assert lines["R_FAD (ρ = 0.1, α = 0.5)"][0] == "0.3"
    assert lines["λ_max by Eq. 4 from R_FAD"] == ("40", "exact at a minimum of a quadratic")
    assert remarks(MEASURED) == []
    worse = replace(
        MEASURED,
        eigenvalues=replace(MEASURED.eigenvalues, converged=False),
        trace=replace(MEASURED.trace, converged=False),
        flatness=replace(MEASURED.flatness, converged=False),
    )
    said = remarks(worse)
    assert len(said) == 3
    assert "the trace did not converge: its relative standard error is 1.5%" in said[1]
    assert "requested 2%" in said[1]
    cells = list(measured_table(worse).columns[2].cells)
    assert "± 1.5; 95% CI 96 to 104; not converged" in map(str, cells)


@pytest.mark.parametrize(
    ("implied", "largest", "disagrees"),
    [(43.9, 40.0, False), (44.1, 40.0, True), (35.9, 40.0, True), (3.0, -2.0, True)],
)
def test_eq_4_is_explained_where_it_disagrees(implied, largest, disagrees) -> None:
    flat = replace(MEASURED.flatness, lambda_max=implied)
    # A gradient of whatever size: the numbers decide.
    for norm in (1e-6, 10.0):
        said = remarks(made((largest,), flatness=flat, gradient_norm=norm))
        assert len(said) == disagrees
    if disagrees:
        assert f"Eq. 4 gives {implied:.3g}, but λ_max is {largest:.3g}" in said[0]
        assert f"gradient norm = 10, ρ λ_max = {0.1 * largest:.2g}" in said[0]
        assert "not at a minimum" in said[0]
        assert f"not quadratic within ρ (R0 = 0.2, ρ² λ_max / 2 = {largest / 200:.2g})" in said[0]


@pytest.mark.parametrize(
    ("values", "residuals", "unresolved"),
    [
        ((40.0, 0.1), (1e-3, 0.019), False),  # below the tolerance of 0.04, but found well
        ((40.0, 0.1), (1e-3, 0.021), True),
        ((40.0, 20.0, 15.0), (1e-3, 4.1, 1e-3), True),  # not the smallest
        ((40.0, -0.1), (1e-3, 0.019), False),
        ((40.0, -0.1), (1e-3, 0.021), True),
        ((40.0, 0.0), (1e-3, 1e-6), True),
    ],
)
def test_eigenvalues_are_unresolved_by_their_residuals(values, residuals, unresolved) -> None:
    spectrum = replace(MEASURED.eigenvalues, values=values, residuals=residuals)
    said = remarks(replace(MEASURED, eigenvalues=spectrum))
    assert ["unresolved: lower --tol" in remark for remark in said] == [True] * unresolved

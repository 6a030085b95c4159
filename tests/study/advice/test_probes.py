"""The short runs: what they train on, what is chosen from them, and that targets stay unseen."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from steppe.domains import Arrays, Domain, register_dataset
from steppe.domains.catalog import DATASETS
from steppe.domains.dataset import Pixels
from steppe.errors import RunError, UserError
from steppe.study.advice import probes
from steppe.study.advice.advising import fitting
from steppe.study.advice.extent import EXTENTS, FACTORS, FULL, PROBED, Extent
from steppe.study.advice.indicators import INDICATORS, noise_scale
from steppe.study.advice.observing import compared, observe, stratified
from steppe.study.advice.probes import WARM_UP, Probe, Result
from steppe.sweeps import Crew, Worker, jobs, write_plan

TINY = Extent(steps=2, warm_up=1, seeds=1, factors=(1.0, 3.0))


class Unseen(Arrays):
    """Images that nobody may look at."""

    def __getitem__(self, index: int, /) -> Pixels:
        raise AssertionError("an image of the target was read")


@pytest.fixture
def guarded() -> Iterator[str]:
    """A dataset whose last domain cannot be read."""
    name, facts = "Guarded", {"image_size": 8, "augment": False, "backbone": "small-cnn"}

    @register_dataset(name, domains=list("abct"), n_classes=2, pretrained=False, **facts)
    def read(root: Path) -> object:
        rng = np.random.default_rng(0)
        made = []
        for domain in "abct":
            pixels = rng.integers(256, size=(40, 8, 8, 3)).astype(np.uint8)
            kind = Unseen if domain == "t" else Arrays
            made.append(Domain(domain, kind(pixels), np.arange(40) % 2))
        return ["x", "y"], made

    yield name
    del DATASETS._entries[name.lower()]  # type: ignore[attr-defined]


def test_every_indicator_without_an_image_of_the_target(guarded: str, tmp_path: Path) -> None:
    planned = probes.grids(guarded, "t", TINY)
    sweep = write_plan(list(planned.values()), tmp_path / "sweep")
    assert Worker(sweep, "cpu").work() == len(planned) == 3 * (4 * 2 + 1)
    done = probes.folders(sweep, planned)
    values = observe(done, probes.results(done, planned), "cpu")
    assert set(values) == {one.name for one in INDICATORS}
    assert values["images"] == pytest.approx(2 * 32)
    assert values["classes"] == 2
    assert values == observe(done, probes.results(done, planned), "cpu")


def test_domains_do_not_count_as_noise() -> None:
    """Batches without noise, of domains with opposite gradients: training averages these out."""
    rows = [torch.tensor([[5.0, 1.0]] * 3), torch.tensor([[-5.0, 1.0]] * 4)]
    assert noise_scale(stratified(rows), 8) == 0.0
    assert noise_scale(torch.cat(rows), 4) > 8.0


def test_runs_are_paired_and_leave_out_each_source() -> None:
    planned = probes.grids("RotatedDigits", "75")
    sources = ("0", "15", "30", "45", "60")
    assert len(planned) == len(sources) * (len(PROBED) * 3 * 2 + 1)
    configs = {probe: next(jobs(grid))[1] for probe, grid in planned.items()}
    for probe, config in configs.items():
        assert config.targets == (probe.left_out,)
        assert set(config.sources) == set(sources) - {probe.left_out}
        fellow = configs[Probe("sgd", probe.left_out, probe.seed, 1.0)]
        assert (config.seed, config.trial_seed) == (fellow.seed, fellow.trial_seed)
        assert config.trial_seed >= probes.FIRST_SEED
        assert config.steps == (FULL.warm_up if probe.factor == WARM_UP else FULL.steps) + 1
    rates = [configs[Probe("fad", "0", 0, f)].optimizer.options["lr"] for f in FACTORS]
    assert rates[0] == pytest.approx(rates[1] / 3, rel=1e-3)
    assert rates[2] == pytest.approx(rates[1] * 3, rel=1e-3)


def test_a_target_is_a_domain_and_three_others_are_left(guarded: str) -> None:
    assert probes.sources("PACS", None) == ("art_painting", "cartoon", "photo", "sketch")
    assert probes.sources("PACS", "photo") == ("art_painting", "cartoon", "sketch")
    with pytest.raises(UserError, match="target of PACS: 'sketchy'"):
        probes.sources("PACS", "sketchy")
    assert probes.sources(guarded, None) == ("a", "b", "c", "t")
    with pytest.raises(UserError, match=r"ColoredMNIST has 2 domains besides \+90%: .* at least 3"):
        probes.sources("ColoredMNIST", "+90%")


def test_domains_with_separators_in_their_names_are_left_out() -> None:
    planned = probes.grids("ColoredMNIST", None, TINY)
    left_out = {probe.left_out: next(jobs(grid))[1].targets for probe, grid in planned.items()}
    assert left_out == {name: (name,) for name in ("+90%", "+80%", "-90%")}


def test_one_class_is_refused(tmp_path: Path) -> None:
    for domain in "abc":
        (tmp_path / "one" / domain / "x").mkdir(parents=True)
        (tmp_path / "one" / domain / "x" / "1.png").touch()
    with pytest.raises(UserError, match="one has one class"):
        probes.sources(str(tmp_path / "one"), None)


def test_targets_of_one_dataset_fit_into_one_sweep(tmp_path: Path) -> None:
    every = [probes.grids("RotatedDigits", target, TINY) for target in ("60", "75", None)]
    grids = [grid for planned in every for grid in planned.values()]
    assert len(write_plan(grids, tmp_path / "sweep").names) == len(grids)


def test_the_learning_rate_is_chosen_by_source_validation() -> None:
    found = {
        Probe("sgd", "a", 0, 1.0): Result(60.0, 90.0),
        Probe("sgd", "b", 0, 1.0): Result(60.0, 90.0),
        Probe("sgd", "a", 0, 3.0): Result(80.0, 10.0),
        Probe("sgd", "b", 0, 3.0): Result(70.0, 10.0),
        Probe("fad", "a", 0, 1.0): Result(80.0, 10.0),
        Probe("fad", "a", 0, 3.0): Result(None, None),  # diverged
        Probe("sam", "a", 0, 1 / 3): Result(80.0, 10.0),
        Probe("sam", "a", 0, 1.0): Result(80.0, 20.0),
        Probe("sam", "a", 0, 3.0): Result(80.0, 30.0),
    }
    assert probes.tuned(found) == {"sgd": 3.0, "fad": 1.0, "sam": 1.0}
    assert probes.tuned(dict(reversed(found.items()))) == probes.tuned(found)


def test_gains_are_over_the_baseline_and_divergence_is_worth_nothing() -> None:
    found = {Probe(name, "a", 0, 1.0): Result(70.0, 50.0) for name in PROBED}
    found[Probe("fad", "a", 0, 1.0)] = Result(72.0, 55.0)
    found[Probe("sgd", "a", 0, 1.0)] = Result(None, None)
    values = compared(found)
    assert (values["validation"], values["left-out"]) == (70.0, 50.0)
    assert (values["validation gain of fad"], values["left-out gain of fad"]) == (2.0, 5.0)
    assert values["left-out gain of sgd"] == -50.0


def test_a_failed_run_is_named(tmp_path: Path) -> None:
    planned = probes.grids("RotatedDigits", None, replace(TINY, left_out=1))
    sweep = write_plan(list(planned.values()), tmp_path / "sweep")
    with pytest.raises(RunError, match=rf"{len(planned)} short runs failed, such as .*no result"):
        probes.folders(sweep, planned)


def test_the_extent_fits_the_budget(tmp_path: Path) -> None:
    plans = {extent: probes.grids("RotatedDigits", "75", extent) for extent in EXTENTS}
    sizes = [len(plan) * extent.steps for extent, plan in plans.items()]
    assert sizes == sorted(sizes, reverse=True)
    crew = Crew(workers=1)
    # Without a record, a run takes only its overhead.
    assert fitting(plans, [], 1e9, crew) == FULL
    assert fitting(plans, [], 0.0, crew) == EXTENTS[-1]
    middle = fitting(plans, [], 20.0, crew)
    assert middle not in (FULL, EXTENTS[-1])

"""Batches: a function of seed, domain and step, whoever reads them and whatever happens around."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch.utils.data._utils import signal_handling

from steppe.domains import Arrays, Domain, Files, Split, UnreadableImage
from steppe.domains.augment import DRAWS, augment, resize
from steppe.domains.batches import Batch, Plan, Sampling, View
from steppe.domains.store import Host
from steppe.errors import RunError, UserError
from tests.limits import seconds

# Newer Pythons warn of what a loader has always done.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")

SIZE = 16
PLAIN, AUGMENTED = View(SIZE, augment=False), View(SIZE, augment=True)
UNLIKELY = 1e-3
"""A p-value below it fails a test; seeds are fixed."""


def planned_batches(plan: Plan, numbers: range, workers: int = 0) -> Iterator[list[Batch]]:
    return Host(torch.device("cpu"), workers).batches(plan, numbers)


def evaluation_batches(*args: Any, workers: int = 0) -> Iterator[Batch]:
    return Host(torch.device("cpu"), workers).evaluation(*args)


def files(root: Path, name: str, n: int, seed: int) -> Domain:
    """A domain of image files of several shapes."""
    rng = np.random.default_rng(seed)
    names = [f"{i}.png" for i in range(n)]
    (root / name).mkdir(parents=True)
    for i in names:
        height, width = rng.integers(10, 30, size=2)
        pixels = rng.integers(256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name / i)
    return Domain(name, Files(root / name, names), rng.integers(5, size=n))


def split(domain: Domain, position: int, held_out: int = 3) -> Split:
    order = np.random.default_rng(position).permutation(len(domain))
    return Split(
        domain, position, True, {"train": order[held_out:], "val": np.sort(order[:held_out])}
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Split, ...]:
    root = tmp_path_factory.mktemp("images")
    return split(files(root, "ink", 14, 0), 0), split(files(root, "oil", 9, 1), 2)


@pytest.fixture
def sampling(sources: tuple[Split, ...]) -> Sampling:
    return Sampling(sources, batch_size=6, view=AUGMENTED, seed=3)


def same(found: Any, expected: Any) -> bool:
    found, expected = list(found), list(expected)
    if isinstance(found[0], Batch):
        found, expected = [found], [expected]
    return len(found) == len(expected) and all(
        torch.equal(x.images, y.images) and torch.equal(x.labels, y.labels)
        for a, b in zip(found, expected, strict=True)
        for x, y in zip(a, b, strict=True)
    )


def test_a_batch_is_what_its_draw_says(sampling):
    for plain in (False, True):
        now = replace(sampling, view=PLAIN if plain else AUGMENTED)
        for source, batch in zip(now.sources, now.batches(5), strict=True):
            chosen, draws = now.draw(source, 5)
            assert (draws is None) == plain
            assert np.isin(chosen, source.parts["train"]).all()
            for k, i in enumerate(chosen):
                pixels = source.domain.images[int(i)]
                expected = resize(pixels, SIZE) if plain else augment(pixels, draws[k], SIZE)
                np.testing.assert_array_equal(batch.images[k].permute(1, 2, 0), expected)
                assert batch.labels[k] == source.domain.labels[i]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_depends_on_seed_domain_and_step_only(sampling, workers):
    expected = [sampling.batches(step) for step in range(6)]
    assert same(planned_batches(sampling, range(6), workers), expected)
    assert same(planned_batches(sampling, range(4, 6), workers), expected[4:]), (
        "begun in the middle"
    )
    found = []
    for step, batches in enumerate(planned_batches(sampling, range(6), workers)):
        found.append(batches)
        domain = sampling.sources[0].domain
        list(
            evaluation_batches(
                domain, np.arange(3), AUGMENTED, 2, (1, 2), workers=workers % (step + 1)
            )
        )
        random.seed(step), np.random.seed(step), torch.manual_seed(step)
    assert same(found, expected), "with evaluations and other people's seeds in between"


def test_seed_domain_and_step_each_matter(sampling, sources):
    twin = replace(sources[0], position=1)
    one = replace(sampling, sources=(sources[0], twin))
    first, second = one.batches(0)
    others = [second, one.batches(1)[0], replace(one, seed=4).batches(0)[0]]
    assert not any(torch.equal(first.images, other.images) for other in others)
    # The same image twice in a batch is not augmented alike.
    alone = Domain("alone", sources[0].domain.images, sources[0].domain.labels)
    alone = Split(alone, 0, True, {"train": np.array([4])})
    batch = replace(sampling, sources=(alone,)).batches(0)[0]
    assert batch.labels.unique().numel() == 1
    assert batch.images.flatten(1).unique(dim=0).shape[0] == 6


def test_shares_of_several_processes_make_up_one_batch(sampling):
    for world in (2, 3):
        shares = [replace(sampling, rank=rank, world=world).batches(7) for rank in range(world)]
        for number, whole in enumerate(sampling.batches(7)):
            for rank in range(world):
                assert same([shares[rank][number]], [Batch(*(t[rank::world] for t in whole))])
    with pytest.raises(UserError, match="batch_size=6 is not a multiple of 4 processes"):
        replace(sampling, world=4)


def test_sampling_is_uniform_with_replacement_over_the_train_split(sources):
    sampling = Sampling(sources, batch_size=40, view=PLAIN, seed=0)
    for source in sources:
        train = source.parts["train"]
        draws = np.stack([sampling.draw(source, step)[0] for step in range(200)])
        values, counts = np.unique(draws, return_counts=True)
        assert set(values) == set(train)
        assert stats.chisquare(counts).pvalue > UNLIKELY
        # Independent of the place in the batch and of the step before it.
        for a, b in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
            table = np.histogram2d(a.ravel(), b.ravel(), [[*np.sort(train), 99]] * 2)[0]
            assert stats.chi2_contingency(table).pvalue > UNLIKELY


def test_a_source_smaller_than_the_batch_works(tmp_path):
    tiny = split(files(tmp_path, "tiny", 2, 0), 0, held_out=1)
    sampling = Sampling((tiny,), batch_size=32, view=AUGMENTED, seed=0)
    (batch,) = next(planned_batches(sampling, range(1)))
    assert len(batch.images) == len(batch.labels) == 32


@contextmanager
def generators_untouched() -> Iterator[None]:
    def states() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state()
        return random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()

    before = states()
    yield
    assert states() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_leave_the_global_generators_alone(sampling, workers):
    domain = sampling.sources[1].domain
    with generators_untouched():
        list(planned_batches(sampling, range(3), workers))
        list(evaluation_batches(domain, np.arange(9), AUGMENTED, 4, (0,), workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_goes_over_the_chosen_images_once_in_order(sources, workers):
    domain = sources[0].domain
    chosen = np.array([3, 1, 13, 0, 7])
    plain = list(evaluation_batches(domain, chosen, PLAIN, 2, workers=workers))
    assert [len(batch.labels) for batch in plain] == [2, 2, 1]
    expected = np.stack([resize(domain.images[int(i)], SIZE) for i in chosen])
    found = torch.cat([batch.images for batch in plain]).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(found, expected)
    assert torch.cat([batch.labels for batch in plain]).tolist() == domain.labels[chosen].tolist()
    assert list(evaluation_batches(domain, chosen[:0], PLAIN, 2, workers=workers)) == []

    seen = [
        list(evaluation_batches(domain, chosen, AUGMENTED, 2, seeds, workers=workers))
        for seeds in ((1, 0), (1, 0), (1, 1))
    ]
    assert same(seen[0], seen[1])
    assert not same(seen[0], seen[2])
    draws = np.random.default_rng([2, 1, 0, 2]).random((1, DRAWS))
    expected = augment(domain.images[7], draws[0], SIZE)
    np.testing.assert_array_equal(seen[0][2].images[0].permute(1, 2, 0), expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels", [1, 3])
def test_layout_is_channels_last_without_a_copy(workers, channels):
    pixels = np.random.default_rng(0).integers(256, size=(9, SIZE, SIZE, channels), dtype=np.uint8)
    domain = Domain("arrays", Arrays(pixels), np.arange(9))
    sampling = Sampling((split(domain, 0),), 4, PLAIN, 0)
    (batch,) = next(planned_batches(sampling, range(1), workers))
    (other,) = evaluation_batches(domain, np.arange(9), PLAIN, 9, workers=workers)
    for images, labels in (batch, other):
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert images.shape[1:] == (channels, SIZE, SIZE)
        assert images.is_contiguous(memory_format=torch.channels_last)
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1), pixels[labels])
    other.images.zero_()
    assert pixels.any(), "a batch is nobody else's memory"


def children() -> list[int]:
    return [process.pid or 0 for process in multiprocessing.active_children()]


def complaint(batches: Any) -> str:
    """What an error says; the error itself, which holds on to the loader, is let go of."""
    try:
        list(batches)
    except UnreadableImage as error:
        return str(error)
    return ""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_an_unreadable_image_is_named(tmp_path, workers, kind):
    domain = files(tmp_path, "ink", 8, 0)
    bad = tmp_path / "ink" / "5.png"
    bad.write_bytes(bad.read_bytes()[:60])
    if kind == "training":
        sampling = Sampling((split(domain, 0, held_out=0),), 2, AUGMENTED, 0)
        batches: Any = planned_batches(sampling, range(10_000), workers)
    else:
        batches = evaluation_batches(domain, np.arange(8), PLAIN, 2, workers=workers)
    message = complaint(batches)
    assert str(bad) in message
    assert "\n" not in message
    assert "DataLoader" not in message
    assert not children()


def test_nothing_hangs_when_the_consumer_stops_early(sampling, monkeypatch):
    # So long, instead of 5 s, torch waits for a worker that does not end, before it kills it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", seconds(60))
    batches = planned_batches(sampling, range(10**9), workers=2)
    for _ in range(3):
        next(batches)
    assert len(workers := multiprocessing.active_children()) == 2
    batches.close()
    assert not children()
    assert [worker.exitcode for worker in workers] == [0, 0]  # by themselves
    for _ in planned_batches(sampling, range(10**9), workers=2):
        break
    assert not children()


def test_workers_outlive_the_signals_of_their_group(sampling):
    expected = [sampling.batches(step) for step in range(40)]
    batches = planned_batches(sampling, range(40), workers=2)
    found = [next(batches)]
    for name in ("TERM", "INT"):
        subprocess.run(["kill", f"-{name}", *map(str, children())], check=True)
    assert same([*found, *batches], expected)


def run_in_a_group(work: Callable[[], None]) -> multiprocessing.Process:
    """Starts a process with a process group of its own."""

    def target() -> None:
        os.setsid()
        work()

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process  # type: ignore[return-value]


def exit_code(process: multiprocessing.Process) -> int | None:
    process.join(seconds(200))
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_no_moment_of_a_workers_birth_is_open_to_a_signal(sampling):
    context = multiprocessing.get_context("fork")
    ready, heard = context.Event(), context.Value("i", 0)

    def work() -> None:
        def hear(*_: object) -> None:
            heard.value += 1

        signal.signal(signal.SIGTERM, hear)
        ready.set()
        for _ in range(5):
            assert len(list(planned_batches(sampling, range(4), workers=2))) == 4

    process = run_in_a_group(work)
    assert ready.wait(seconds(200))
    deadline = time.monotonic() + seconds(200)
    while process.is_alive() and time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGTERM)
        time.sleep(0.001)
    assert exit_code(process) == 0
    assert heard.value > 10


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_loader_that_was_not_closed_does_not_keep_its_process(sampling):
    kept = []

    def work() -> None:
        kept.append(planned_batches(sampling, range(10**9), workers=2))
        next(kept[0])

    assert exit_code(run_in_a_group(work)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize("moment", ["between batches", "while one is waited for"])
def test_a_killed_worker_ends_the_run_with_one_line(sampling, moment):
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()

    def work() -> None:  # in a process of its own, where torch has not handled any signal so far
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = False
        batches = planned_batches(sampling, range(10**9), workers=2)
        next(batches)
        victim = children()[0]
        if moment == "between batches":
            os.kill(victim, signal.SIGKILL)
            time.sleep(0.5)  # torch would raise here, in the middle of a step
        else:
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
        try:
            for _ in batches:
                pass
        except RunError as error:
            said.put(str(error))

    process = run_in_a_group(work)
    assert exit_code(process) == 0
    assert "a process that reads images was killed" in said.get()

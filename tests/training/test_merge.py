"""Merged runs: the right weights, chosen on source validation alone, in a run like any other."""

import json
import os
import shutil
import signal
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from steppe.averaging.merging import between
from steppe.domains.batches import Sampling, View
from steppe.errors import UserError
from steppe.measure import Settings, measure_run
from steppe.reports import load_runs
from steppe.training import (
    RunDirectory,
    TrainedModel,
    evaluate_run,
    export_run,
    ingredients,
    load_model,
    make_config,
    merge,
    merge_runs,
    select,
    train,
    validation_accuracy,
)
from steppe.training.initial import initialize
from steppe.training.scoring import Scoring
from steppe.training.served import load_served
from steppe.training.setup import open_data

DIGITS = {
    "dataset": "RotatedDigits",
    "targets": ["75"],
    "sources": ["0", "30"],
    "optimizer": {"name": "sgd", "lr": 0.05},
    "steps": 9,
    "checkpoint_every": 4,
    "batch_size": 16,
    "freeze_bn": True,
    "init_seed": 0,
    "device": "cpu",
}

State = dict[str, Tensor]


def run(path: Path, **changes: Any) -> Path:
    train(make_config({**DIGITS, **changes}), path)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs from the same initial weights, the second of which has hardly learned."""
    home = tmp_path_factory.mktemp("runs")
    lrs = (0.1, 1e-4, 0.1)
    found = [
        run(home / str(seed), seed=seed, optimizer={"name": "sgd", "lr": lr})
        for seed, lr in enumerate(lrs)
    ]
    return [*found, run(home / "3", seed=3, steps=5)]


@pytest.fixture(scope="module")
def tuned(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that starts from another one, classifier included."""
    return run(tmp_path_factory.mktemp("tuned") / "tuned", weights=str(runs[3]), seed=7)


def weights(path: Path, which: str | None = None) -> State:
    return load_served(RunDirectory(path), which).tensors


def assert_same(a: State, b: State, prefix: str = "") -> None:
    names = [name for name in a if name.startswith(prefix)]
    assert names
    assert [name for name in names if not torch.equal(a[name], b[name])] == []


def mean(states: Sequence[State]) -> State:
    return {
        name: (sum(state[name].double() for state in states) / len(states)).to(value.dtype)
        for name, value in states[0].items()
    }


def accuracy(path: Path, state: State, part: str = "val") -> float:
    """Of a run's model with other weights, over all images of one kind at once."""
    model = load_model(path)
    model.algorithm.load_state_dict(state)
    _, splits = open_data(RunDirectory(path).config())
    return float(np.mean([_share(model, split, part) for split in splits if part in split.parts]))


def _share(model: TrainedModel, split: Any, part: str) -> float:
    chosen = split.parts[part]
    pixels = np.stack([split.domain.images[i] for i in chosen])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    with torch.no_grad():
        right = model(images).argmax(1).numpy() == split.domain.labels[chosen]
    return float(right.mean())


def recorded(path: Path) -> float:
    value = validation_accuracy(select(RunDirectory(path).records()))
    assert value is not None
    return value


def forged(source: Path, to: Path, data: dict[str, Any] | None = None, **config: Any) -> Path:
    """A copy of a run with other settings, as far as its files say."""
    shutil.copytree(source, to)
    for name, changes in (("config.json", config), ("data.json", data or {})):
        values = {**json.loads((to / name).read_text()), **changes}
        (to / name).write_text(json.dumps(values))
    return to


def test_equal_runs_give_the_same_bits(runs, tmp_path) -> None:
    copies = [forged(runs[0], tmp_path / str(i)) for i in range(3)]
    for how in ("uniform", "greedy"):
        merged = merge_runs(copies, tmp_path / how, how=how)
        assert len(merged.runs) == 3  # an average that stays the same is not worse
        for which in ("best", "last"):
            assert_same(weights(runs[0]), weights(tmp_path / how, which))
    assert merged.record["domains"] == select(RunDirectory(runs[0]).records())["domains"]


def test_equal_runs_keep_their_live_batch_norm(tmp_path) -> None:
    live = run(tmp_path / "live", freeze_bn=False)
    for how in ("uniform", "greedy"):
        merge_runs([live, forged(live, tmp_path / f"{how} of")], tmp_path / how, how=how)
        assert_same(weights(live), weights(tmp_path / how))


def test_uniform_is_the_mean_of_the_best_weights(runs, tmp_path) -> None:
    merged = merge_runs(runs, tmp_path / "out", how="uniform")
    expected = mean([weights(path) for path in runs])
    assert_same(expected, weights(tmp_path / "out"))
    assert validation_accuracy(merged.record) == pytest.approx(accuracy(runs[0], expected))
    tested = merged.record["domains"]["75"]["test"]["accuracy"]
    assert tested == pytest.approx(accuracy(runs[0], expected, "test"))
    last = merge_runs(runs, tmp_path / "last", how="uniform", which="last")
    assert len(last.runs) == 4
    assert_same(mean([weights(path, "last") for path in runs]), weights(tmp_path / "last"))


def test_greedy_does_what_the_paper_says(runs, tmp_path) -> None:
    """Against a plain loop; the result is never below the best run on validation."""
    order = sorted(runs, key=recorded, reverse=True)
    kept, best = order[:1], recorded(order[0])
    for path in order[1:]:
        value = accuracy(path, mean([weights(one) for one in (*kept, path)]))
        if value >= best:
            kept, best = [*kept, path], value
    assert 1 < len(kept) < len(runs)
    merged = merge_runs(runs, tmp_path / "out")
    assert merged.runs == tuple(map(str, kept))
    assert_same(mean([weights(path) for path in kept]), weights(tmp_path / "out"))
    assert recorded(tmp_path / "out") == pytest.approx(best)
    assert recorded(tmp_path / "out") >= max(map(recorded, runs))
    config = RunDirectory(tmp_path / "out").config()
    assert config.merged_from == tuple(str(path.resolve()) for path in kept)
    assert config.seed == int(kept[0].name)  # the best one's settings


@pytest.mark.parametrize("how", ["greedy", "wise"])
def test_only_source_validation_is_looked_at(how, runs, tuned, tmp_path, monkeypatch) -> None:
    scored: list[tuple[str, str]] = []
    score = Scoring._score

    def watched(self: Scoring, split: Any, part: str, *rest: Any) -> Any:
        scored.append((split.domain.name, part))
        return score(self, split, part, *rest)

    monkeypatch.setattr(Scoring, "_score", watched)
    merge_runs(runs if how == "greedy" else [tuned], tmp_path / "out", how=how)
    looks = len(runs) if how == "greedy" else len(merge.ALPHAS)
    assert scored[: 2 * looks] == [("0", "val"), ("30", "val")] * looks
    assert len(set(scored[2 * looks :])) == len(scored[2 * looks :]) == 6  # the record's


def test_files_are_read_one_after_another(runs, tmp_path, monkeypatch) -> None:
    """Once each, and never two in memory."""
    alive: list[weakref.ref[Tensor]] = []
    read: list[Path] = []

    def watched(directory: RunDirectory, which: str | None = None) -> Any:
        assert all(value() is None for value in alive)
        found = load_served(directory, which)
        name = next(name for name in found.tensors if "weight" in name)
        alive.append(weakref.ref(found.tensors[name]))
        read.append(directory.path)
        return found

    monkeypatch.setattr(merge, "load_served", watched)
    merge_runs(runs, tmp_path / "out", how="uniform")
    assert read == runs


def test_live_batch_norm_is_estimated_anew(tmp_path, monkeypatch) -> None:
    """From training batches, as SWAD does; a single run keeps its own statistics."""
    paths = [run(tmp_path / str(s), seed=s, freeze_bn=False) for s in range(2)]
    merge_runs(paths, tmp_path / "out", how="uniform")
    expected = load_model(tmp_path / "out").algorithm.network
    expected_means = mean([weights(path) for path in paths])
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    trained = {n: v for n, v in expected_means.items() if not n.endswith(statistics)}
    assert_same(trained, weights(tmp_path / "out"))
    config = RunDirectory(paths[0]).config()
    _, splits = open_data(config)
    sampling = Sampling(tuple(s for s in splits if s.source), 16, View(8, False), config.seed)
    network = load_model(tmp_path / "out").algorithm.network
    images = [
        network.normalize(torch.cat([b.images for b in sampling.batches(step)]))
        for step in range(config.steps)
    ]
    network.train()
    update_bn(images, network)
    norms = {n: m for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for name, norm in norms.items():
        found = expected.get_submodule(name)
        torch.testing.assert_close(found.running_mean, norm.running_mean)
        torch.testing.assert_close(found.running_var, norm.running_var)
    values = iter([0.9, 0.1])
    monkeypatch.setattr(merge._Merger, "_validate", lambda self: next(values))
    (kept,) = merge_runs(paths, tmp_path / "greedy").runs
    assert_same(weights(Path(kept)), weights(tmp_path / "greedy"))


def test_a_merged_run_is_a_run(runs, tmp_path) -> None:
    merged = merge_runs(runs[:2], tmp_path / "out", how="uniform")
    out = tmp_path / "out"
    assert RunDirectory(out).state == "done"
    assert RunDirectory(out).records() == [merged.record]
    assert merged.record["averaged"]
    assert RunDirectory(out).data() == RunDirectory(runs[0]).data()
    for which in ("best", "last"):
        assert evaluate_run(out, which=which)["75"].images == 299
        assert load_model(out, which).averaged
    facts = export_run(out, tmp_path / "out.safetensors")
    assert facts["averaging"] == "soup"
    assert str(tmp_path) not in json.dumps(facts)
    found = measure_run(out, Settings(top=1, images=8, trace_rtol=0.5), device="cpu")
    assert found.lambda_max > 0
    (row,) = (one.row for one in load_runs(out).runs)
    assert row.name == "sgd soup"
    with pytest.raises(UserError, match="a merged run cannot be trained"):
        make_config(RunDirectory(out).config().model_dump())


def test_names_of_mixed_methods(runs, tmp_path) -> None:
    """Any algorithm that predicts with the plain network, any optimizer, any averaging."""
    others = [
        run(tmp_path / "coral", algorithm="CORAL", optimizer="adam", draw=None),
        run(tmp_path / "dann", algorithm="DANN", averaging={"name": "sma", "start": 1}),
    ]
    merge_runs([*others, runs[0]], tmp_path / "out", how="uniform")
    config = RunDirectory(tmp_path / "out").config()
    names = [axis.name for axis in (config.algorithm, config.optimizer, config.averaging)]
    assert names == ["ERM", "adam+sgd", "sma+soup"]
    states = [weights(path) for path in (*others, runs[0])]
    network = [{n: v for n, v in s.items() if n.startswith("network.")} for s in states]
    assert_same(mean(network), weights(tmp_path / "out"))


def test_runs_of_two_stages_are_merged_without_validation(tmp_path) -> None:
    """As ERM++ makes them: on all images, with a schedule that the merge does not follow."""
    recipe = {"second_stage": True, "lr_schedule": "plateau", "averaging": "sma"}
    paths = [run(tmp_path / str(s), seed=s, evaluate_both=True, **recipe) for s in (0, 1)]
    with pytest.raises(UserError, match="no validation images to choose by"):
        merge_runs(paths, tmp_path / "out")
    merged = merge_runs(paths, tmp_path / "out", how="uniform")
    assert validation_accuracy(merged.record) is None
    assert_same(mean([weights(path) for path in paths]), weights(tmp_path / "out"))


def test_what_predictions_do_not_use_is_the_first_runs(tmp_path) -> None:
    """Discriminators of any width are neither averaged nor compared."""
    widths = (64, 128)
    paths = [run(tmp_path / str(w), seed=w, algorithm={"name": "DANN", "width": w}) for w in widths]
    merge_runs(paths, tmp_path / "out", how="uniform")
    first, second = map(weights, paths)
    found = weights(tmp_path / "out")
    others = [name for name in first if not name.startswith("network.")]
    assert_same({name: first[name] for name in others}, found)
    network = [{n: v for n, v in s.items() if n not in others} for s in (first, second)]
    assert not torch.equal(*(s["network.classifier.weight"] for s in network))
    assert_same(mean([{n: s[n] for n in network[0]} for s in (first, second)]), found)
    assert RunDirectory(tmp_path / "out").config().algorithm.name == "DANN"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "head": ({"init_seed": 5}, {}, "different initial weights .*same --init-seed"),
    "seed": ({"init_seed": None, "seed": 8}, {}, r"init_seed 8\) and none \(init_seed 0\)"),
    "weights": ({"weights": "/some/file.pt"}, {}, "different initial weights"),
    "backbone": ({"backbone": "mnist-cnn"}, {}, "different backbone"),
    "size": ({"image_size": 16}, {}, "different image_size"),
    "norm": ({"freeze_bn": False}, {}, "different freeze_bn"),
    "targets": ({"targets": ["60"]}, {}, r"different targets \(\['60'\] and \['75'\]\)"),
    "sources": ({}, {"sources": ["0", "15"]}, "different training domains"),
    "classes": ({}, {"classes": list("abcdefghij")}, "different classes"),
    "images": ({}, {"fingerprint": "0"}, "different images"),
    "split": ({"trial_seed": 1}, {}, r"of the other \(trial_seed=1 against trial_seed=0\)"),
    "stage": ({"second_stage": True}, {}, "trained on validation images of the other"),
    "algorithm": ({"algorithm": {"name": "MTL"}}, {}, "MTL changes the network"),
    "network": ({"algorithm": {"name": "URM"}}, {}, "URM changes the network"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together_is_refused(case, runs, tmp_path) -> None:
    config, data, words = REFUSED[case]
    other = forged(runs[0], tmp_path / "other", data, **config)
    with pytest.raises(UserError, match=words) as caught:
        merge_runs([runs[2], other], tmp_path / "out", how="uniform")
    assert str(other) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_linear_probe_is_an_initial_head(runs, tmp_path) -> None:
    """The same one for all runs that fit it, whatever their seeds; WiSE-FT starts from it."""
    same = {"weights": str(runs[3]), "linear_probe": True, "steps": 5}
    probed = [run(tmp_path / str(s), seed=s, init_seed=s, **same) for s in (0, 1)]
    merge_runs(probed, tmp_path / "soup", how="uniform")
    other = forged(probed[0], tmp_path / "other", linear_probe=False)
    with pytest.raises(UserError, match="different initial classifier .*--linear-probe"):
        merge_runs([probed[0], other], tmp_path / "out")
    still = {**same, "optimizer": {"name": "sgd", "lr": 0.0}}
    merge_runs([probed[0]], tmp_path / "wise", how="wise", alpha=0)
    assert_same(weights(run(tmp_path / "still", **still)), weights(tmp_path / "wise"))


def test_initial_heads_are_compared_even_if_the_backbones_agree(runs, tmp_path) -> None:
    both = [forged(runs[0], tmp_path / str(s), weights="/the/same.pt", init_seed=s) for s in (0, 1)]
    with pytest.raises(UserError, match="different initial classifier .*--init-seed"):
        merge_runs(both, tmp_path / "out")


def test_a_dataset_that_comes_split_has_no_leaks(runs, tmp_path, monkeypatch) -> None:
    other = forged(runs[0], tmp_path / "other", trial_seed=1)
    same = open_data(RunDirectory(runs[0]).config())
    monkeypatch.setattr(ingredients.setup, "open_data", lambda config: same)
    ingredients.plan_merge([runs[2], other])


def test_other_errors(runs, tuned, tmp_path) -> None:
    def refused(words: str, *paths: Path, **options: Any) -> None:
        with pytest.raises(UserError, match=words):
            merge_runs(paths, options.pop("out", tmp_path / "out"), **options)

    refused("'unifrom', did you mean 'uniform'", *runs, how="unifrom")
    refused("at least two runs, got 1", runs[0])
    refused("listed twice", runs[0], runs[0])
    refused("is not a run", runs[0], tmp_path / "gone")
    refused("already exists: choose another --out", *runs, out=runs[0])
    refused("belong to --how wise", *runs, alpha=0.5)
    refused("got 4 runs", *runs, how="wise")
    refused("between 0 and 1, got 1.5", tuned, how="wise", alpha=1.5)
    refused("has no record of step 3", *runs, which="step:3")
    refused("has no initial weights that predict.*--from", runs[0], how="wise")
    other = forged(runs[0], tmp_path / "unfinished")
    RunDirectory(other).set_state("running")
    refused(r"not finished \(running\)", runs[0], other)
    other = forged(runs[0], tmp_path / "elsewhere", {"fingerprint": "0"})
    refused("the images of RotatedDigits", other, forged(other, tmp_path / "too"))
    other = forged(runs[0], tmp_path / "blind")
    records = [json.loads(line) for line in (other / "records.jsonl").read_text().splitlines()]
    for record in records:
        del record["crc32"], record["domains"]["0"]["val"], record["domains"]["30"]["val"]
    (other / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    refused("blind has no validation images.*--how uniform", runs[0], other)
    assert not (tmp_path / "out").exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_ends_of_wise_are_the_runs(runs, tuned, tmp_path) -> None:
    merge_runs([tuned], tmp_path / "1", how="wise", alpha=1)
    assert_same(weights(tuned), weights(tmp_path / "1"))
    merge_runs([tuned], tmp_path / "0", how="wise", alpha=0)
    assert_same(weights(runs[3]), weights(tmp_path / "0"))
    merge_runs([tuned], tmp_path / "from", how="wise", alpha=0, start=runs[0])
    assert_same(weights(runs[0]), weights(tmp_path / "from"))
    started = RunDirectory(tmp_path / "from").config().merged_from
    assert started == (str(runs[0].resolve()), str(tuned.resolve()))


def test_wise_takes_the_alpha_that_validates_best(runs, tuned, tmp_path) -> None:
    start, end = weights(runs[3]), weights(tuned)
    values = [accuracy(tuned, between(start, end, alpha)) for alpha in merge.ALPHAS]
    assert len(set(values)) > 2
    found = merge_runs([tuned], tmp_path / "out", how="wise")
    assert found.alpha == merge.ALPHAS[values.index(max(values))]
    config = RunDirectory(tmp_path / "out").config()
    assert config.averaging.model_dump() == {"name": "wise-ft", "alpha": found.alpha}
    assert_same(between(start, end, found.alpha), weights(tmp_path / "out"))


def test_wise_refuses_another_runs_target_and_validation_images(tuned, tmp_path) -> None:
    for changes, words in (
        ({"targets": ["60"]}, "different targets"),
        ({"trial_seed": 1}, "trained on validation images"),
    ):
        other = forged(tuned, tmp_path / words, **changes)
        with pytest.raises(UserError, match=words):
            merge_runs([tuned], tmp_path / "out", how="wise", start=other)


def test_weights_of_a_run_bring_its_classifier_and_nothing_unseen(runs, tmp_path) -> None:
    config = make_config({**DIGITS, "weights": str(runs[0]), "init_seed": 4})
    classes = RunDirectory(runs[0]).data()["classes"]
    assert_same(weights(runs[0]), initialize(config, classes, 1, 2).state_dict())
    # Of other classes, the backbone alone.
    fresh = initialize(config.model_copy(update={"weights": "none"}), classes, 1, 2).state_dict()
    other = initialize(config, classes[::-1], 1, 2).state_dict()
    assert_same(fresh, other, "network.classifier.")
    assert_same(weights(runs[0]), other, "network.featurizer.")
    whole = forged(runs[0], tmp_path / "whole", second_stage=True)
    soup = forged(runs[0], tmp_path / "soup", dataset="Other", merged_from=[str(runs[2])])
    for changes, words in (
        ({"weights": str(soup), "targets": ["0"], "sources": ["15"]}, f"{runs[2]} were trained on"),
        ({"targets": ["0"], "sources": ["15"]}, "were trained on 0, which this run holds out"),
        ({"trial_seed": 1}, "that this run validates on: .*trial_seed=0"),
        ({"weights": str(whole)}, "trained on all images"),
        ({"backbone": "mnist-cnn"}, "do not fit 'mnist-cnn'"),
        ({"algorithm": "MTL"}, "the classifier of .* does not fit MTL"),
        ({"weights": str(tmp_path / "gone")}, "not a file, nor a run's folder"),
    ):
        with pytest.raises(UserError, match=words):
            initialize(make_config({**config.model_dump(), **changes}), classes, 1, 2)


def test_ratatouille(runs, tmp_path) -> None:
    """Backbones that were fine-tuned elsewhere from the same weights."""
    elsewhere = {"classes": list("abcdefghij")}
    starts = [
        forged(runs[0], tmp_path / f"start-{i}", elsewhere, dataset="Other", seed=i, init_seed=0)
        for i in range(2)
    ]
    paths = [run(tmp_path / str(i), weights=str(s), seed=i) for i, s in enumerate(starts)]
    assert len(merge_runs(paths, tmp_path / "out", how="uniform").runs) == 2
    forged(starts[1], tmp_path / "stranger", init_seed=9)
    paths[1] = forged(paths[1], tmp_path / "far", weights=str(tmp_path / "stranger"))
    with pytest.raises(UserError, match="different initial weights"):
        merge_runs(paths, tmp_path / "no", how="uniform")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        die()

    return called


MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "before anything": (merge._Merger, "merge", die),
    "between two runs": (merge._Merger, "_validate", die),
    "with a record": (RunDirectory, "append", after(RunDirectory.append)),
    "done, without a config": (RunDirectory, "set_state", after(RunDirectory.set_state)),
    "before it gets its name": (merge, "sync_folder", die),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_merge_leaves_nothing_half_made(moment, runs, tmp_path, monkeypatch) -> None:
    place = tmp_path / "runs"
    paths = [shutil.copytree(path, place / path.name) for path in runs[:2]]
    child = os.fork()
    if not child:
        setattr(*MOMENTS[moment])
        merge_runs(paths, place / "out")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (place / "out").exists()
    found = load_runs(place)
    assert ({one.path for one in found.runs}, found.problems, found.pending) == ({*paths}, (), ())
    merge_runs(paths, place / "out")
    assert {path.name for path in place.iterdir()} == {"0", "1", "out"}
    assert len(RunDirectory(place / "out").records()) == 1


def test_a_failed_merge_leaves_nothing(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(merge._Merger, "_validate", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merge_runs(runs, tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []

"""Run folders made by hand."""

import itertools
import json
import random

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


def config(targets, trial=0, draw=None, dataset="PACS", **more):
    return {
        "version": 2,
        "dataset": dataset,
        "targets": list(targets),
        "trial_seed": trial,
        "algorithm": {"name": "ERM"},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "averaging": {"name": "none"},
        "steps": 301,
        "batch_size": 32,
        **({"draw": draw, "space": "fad"} if draw is not None else {}),
        **more,
    }


def record(step, targets, accuracy, domains=DOMAINS, averaged=False, **more):
    """A record; `accuracy(domain, part)` says how well it went."""
    scores = {}
    for domain in domains:
        parts = ("test", "oracle") if domain in targets else ("train", "val")
        images = {"train": 80, "test": 80, "val": 20, "oracle": 20}
        scores[domain] = {
            part: {"accuracy": accuracy(domain, part), "images": images[part]} for part in parts
        }
    return {
        "step": step,
        "loss": {"total": 1.0},
        "domains": scores,
        "averaged": averaged,
        "seconds_per_step": 0.5,
        "memory_gb": 1.0,
        **more,
    }


def lines_of(records):
    return [json.dumps(r).encode() + b"\n" for r in records]


def write_run(folder, config, records, state="done"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    data = records if isinstance(records, bytes) else b"".join(lines_of(records))
    (folder / "records.jsonl").write_bytes(data)
    (folder / "state").write_text(state + "\n")
    return folder


def some_sweep(seed, sizes=(1, 2), trials=2, draws=3, steps=(0, 100, 200), optimizers=("adam",)):
    """Configs and records of a sweep whose accuracies are few, so that there are ties."""
    rng = random.Random(seed)
    sweep = []
    for optimizer, trial, draw in itertools.product(optimizers, range(trials), range(draws)):
        for size in sizes:
            for targets in itertools.combinations(DOMAINS, size):
                records = [
                    record(step, targets, lambda d, p: rng.choice((0.1, 0.2, 0.3, 0.7)))
                    for step in steps
                ]
                chosen = {"name": optimizer, "lr": 10.0**-draw}
                sweep.append((config(targets, trial, draw, optimizer=chosen), records))
    return sweep

"""DomainBed's rules once more: slow, and straight from its raw lines.

Nothing here comes from `steppe`. A group is (trial, dataset, algorithm, test domain), and a line
belongs to the group of each of its test domains. Lines are in the order of the files.
"""

import numpy as np


def number_of_domains(line):
    n = 0
    while f"env{n}_out_acc" in line:
        n += 1
    return n


def first_best(pairs):
    """The first of (validation, test) with the highest validation."""
    best = None
    for pair in pairs:
        if best is None or pair[0] > best[0]:
            best = pair
    return best


def by_training_domains(lines):
    pairs = []
    for line in lines:
        if len(line["args"]["test_envs"]) != 1:
            continue
        (test,) = line["args"]["test_envs"]
        others = [i for i in range(number_of_domains(line)) if i != test]
        validation = np.mean([line[f"env{i}_out_acc"] for i in others])
        pairs.append((validation, line[f"env{test}_in_acc"]))
    return first_best(pairs)


def by_leaving_out(lines):
    pairs = []
    for step in sorted({line["step"] for line in lines}):
        here = [line for line in lines if line["step"] == step]
        alone = [line for line in here if len(line["args"]["test_envs"]) == 1]
        if len(alone) != 1:
            continue
        (test,) = alone[0]["args"]["test_envs"]
        n = number_of_domains(alone[0])
        found = {}
        for line in here:
            if len(line["args"]["test_envs"]) == 2:
                (other,) = [e for e in line["args"]["test_envs"] if e != test]
                found[other] = line[f"env{other}_in_acc"]
        if len(found) < n - 1:
            continue
        validation = np.sum([found[i] for i in range(n) if i != test]) / (n - 1)
        pairs.append((validation, alone[0][f"env{test}_in_acc"]))
    return first_best(pairs)


def by_oracle(lines):
    alone = [line for line in lines if len(line["args"]["test_envs"]) == 1]
    if not alone:
        return None
    (test,) = alone[0]["args"]["test_envs"]
    last = max(alone, key=lambda line: line["step"])
    return last[f"env{test}_out_acc"], last[f"env{test}_in_acc"]


RULES = {"train-val": by_training_domains, "leave-one-out": by_leaving_out, "oracle": by_oracle}


def sweep_accuracy(lines, rule):
    """The test accuracy of the best hyperparameters; of equals, the highest seed."""
    best = None
    for seed in sorted({line["args"]["hparams_seed"] for line in lines}):
        pair = rule([line for line in lines if line["args"]["hparams_seed"] == seed])
        if pair is not None and (best is None or pair[0] >= best[0]):
            best = pair
    return None if best is None else best[1]


def accuracies(lines, selection):
    """By (dataset, algorithm, test domain), then trial."""
    groups = {}
    for line in lines:
        args = line["args"]
        for test in args["test_envs"]:
            key = (args["dataset"], args["algorithm"], test)
            groups.setdefault(key, {}).setdefault(args["trial_seed"], []).append(line)
    found = {}
    for key, trials in groups.items():
        for trial, own in trials.items():
            value = sweep_accuracy(own, RULES[selection])
            if value is not None:
                found.setdefault(key, {})[trial] = value
    return found


def mean_and_error(values):
    values = list(values)
    return 100 * np.mean(values), 100 * np.std(values / np.sqrt(len(values)))


def table(lines, selection, dataset, n_domains):
    """By algorithm: a (mean, error, trials) or None for every domain, and the average or None."""
    found = accuracies(lines, selection)
    result = {}
    for algorithm in {r["args"]["algorithm"] for r in lines if r["args"]["dataset"] == dataset}:
        cells = []
        for test in range(n_domains):
            trials = found.get((dataset, algorithm, test))
            cells.append((*mean_and_error(trials.values()), len(trials)) if trials else None)
        missing = any(cell is None for cell in cells)
        average = None if missing else sum(cell[0] for cell in cells) / n_domains
        result[algorithm] = (cells, average)
    return result


def averages(lines, selection):
    """By (algorithm, dataset): (mean, error), of each trial's mean over the domains it has."""
    by_trial = {}
    for (dataset, algorithm, _), trials in sorted(accuracies(lines, selection).items()):
        for trial, value in trials.items():
            by_trial.setdefault((algorithm, dataset), {}).setdefault(trial, []).append(value)
    return {
        key: mean_and_error([np.mean(values) for values in trials.values()])
        for key, trials in by_trial.items()
    }

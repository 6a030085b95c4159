"""The axes crossed: every algorithm with every optimizer, and pairwise with every averaging.

Algorithm number i and optimizer number j go with averaging i + j, so that each pair of values of
any two axes occurs. Options are such that something happens within a few steps: penalties are
annealed, averages begin and end, an adversary has its turns.
"""

from steppe.algorithms import algorithm_names
from steppe.optim import optimizer_names

NAMES = algorithm_names()
"""Now, before an example of the guide adds one of its own."""
OPTIMIZERS = ("sgd", "adam", "sam", "gam", "fad", "adahessian")
AVERAGINGS = (
    {"name": "none"},
    {"name": "swad", "every": 2, "n_converge": 1, "n_tolerance": 2},
    {"name": "sma", "start": 2},
)
OPTIONS: dict[str, dict[str, object]] = {
    "IRM": {"anneal_steps": 3, "penalty": 2.0},
    "VREx": {"anneal_steps": 3, "penalty": 2.0},
    "Fishr": {"anneal_steps": 3, "penalty": 10.0},
    "DANN": {"grad_penalty": 0.1, "dropout": 0.2, "depth": 3, "width": 16},
    "CDANN": {"grad_penalty": 0.1, "dropout": 0.2, "d_steps": 2, "width": 16},
    "ARM": {"support": 2},
    "MLDG": {"inner_lr": 0.1},
}
FIRST_UPDATE = {"CDANN": 1}
"""The first step that changes the network, where others come before: an average has nothing yet."""
STEPS = 7
KILLED_AFTER = 5
"""The checkpoint before it is after 4 updates."""

COMBINATIONS = [
    (algorithm, optimizer, AVERAGINGS[(i + j) % 3])
    for i, algorithm in enumerate(NAMES)
    for j, optimizer in enumerate(OPTIMIZERS)
]
OTHERS = [
    ("ERM", optimizer, AVERAGINGS[0])
    for optimizer in optimizer_names()
    if optimizer not in (*OPTIMIZERS, "sam-on")  # the small network has no such layers
]
"""Every other optimizer, with the plainest algorithm."""


def config(algorithm: str, optimizer: str, averaging: dict[str, object]) -> dict[str, object]:
    return {
        "dataset": "RotatedDigits",
        "sources": ["0", "30", "45"],
        "targets": ["75"],
        "algorithm": {"name": algorithm, **OPTIONS.get(algorithm, {})},
        "optimizer": {"name": optimizer, "lr": 0.001 if optimizer == "adam" else 0.01},
        "averaging": averaging,
        "steps": STEPS,
        "checkpoint_every": 3,
        "batch_size": 4,
        "dropout": 0.2,
        "device": "cpu",
    }


def title(algorithm: str, optimizer: str, averaging: dict[str, object]) -> str:
    return f"{algorithm}-{optimizer}-{averaging['name']}"

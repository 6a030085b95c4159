"""The axes crossed: every algorithm with FAD and two other optimizers, and with every averaging.

Every optimizer also meets every averaging. Options are such that something happens within a few
steps: penalties are annealed, averages begin and end, an adversary has its turns.
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
    "EQRM": {"burn_in_steps": 3},
    "IB-ERM": {"anneal_steps": 3, "penalty": 2.0},
    "IB-IRM": {"anneal_steps": 3, "penalty": 2.0, "ib_anneal_steps": 5, "ib_penalty": 2.0},
    "IGA": {"penalty": 0.1},
    # With its default penalty, updates with FAD multiply a rounding error by 1e5 within five steps.
    "RDM": {"anneal_steps": 3, "penalty": 0.05},
    "Fish": {"inner_lr": 0.1},
    "ADRMX": {"d_steps": 1, "depth": 3, "width": 16},
    "TRM": {"anneal_steps": 2, "penalty": 0.1},
    "Transfer": {"d_steps": 3, "delta": 0.1, "inner_lr": 0.1},
    "DMG": {"stages": 1},
    "pAdaIN": {"p": 0.5},
    "EISNet": {"in_order": 0.5, "queue": 32, "negatives": 4, "ema": 0.5},
    "DSON": {"lr_factor": 10.0},
    "ER": {"width": 16},
    "MASF": {"inner_lr": 0.1},
    "MetaReg": {"inner_steps": 3, "inner_lr": 0.1, "lr_factor": 1.0},
}
FIRST_UPDATE = {"CDANN": 1, "MetaReg": 3}
"""The first step that changes the network, where others come before: an average has nothing yet."""
STEPS = 7
KILLED_AFTER = 5
"""The checkpoint before it is after 4 updates."""

_OTHER = [name for name in OPTIMIZERS if name != "fad"]
COMBINATIONS = [
    (algorithm, optimizer, AVERAGINGS[(i + j) % len(AVERAGINGS)])
    for i, algorithm in enumerate(NAMES)
    for j, optimizer in enumerate(("fad", _OTHER[i % len(_OTHER)], _OTHER[(i + 2) % len(_OTHER)]))
]
OTHERS = [
    ("ERM", optimizer, AVERAGINGS[0])
    for optimizer in optimizer_names()
    if optimizer not in (*OPTIMIZERS, "sam-on")  # the small network has no such layers
]
"""Every other optimizer, with the plainest algorithm."""
OTHERS += [("ERM", "sgd", {"name": "bma"}), ("MetaReg", "fad", {"name": "bma"})]


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

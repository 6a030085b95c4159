"""The catalog of experiments: the paper's tables and figures, and the demo."""

from __future__ import annotations

from typing import Any

from . import figures
from .experiment import Arm, Experiment

OPTIMIZERS = ("adam", "adamw", "sgd", "yogi", "adabelief", "adahessian", "sam", "gam", "fad")
"""The optimizers of Table 1, in its order."""
DATASETS = ("PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet", "NICO++")
DETAILS = ("table1-pacs", "table1-vlcs", "table1-officehome", "table1-terra", "table1-domainnet")
"""The appendix's tables, which break Table 1 down by target."""
ITERATIONS = tuple(
    Arm(("adam", "adamw", "sgd", "yogi", "sam", "gam", "fad"), f"steps{steps}", steps=steps)
    for steps in (5_000, 10_000, 15_000)
)
ITERATED = ("table3", "table1-pacs", "iterations-pacs", "iterations-nico", "table1-nico")
"""Tables with the paper's numbers for `ITERATIONS`."""
LONG: dict[str, dict[str, Any]] = {
    "small": {"trials": 2, "share": 0.05},
    "smoke": {"datasets": ("RotatedDigits",)},
}
OLDER = ("MASF", "DMG", "MetaReg", "ER", "pAdaIN", "EISNet", "DSON")
"""The methods of Table 2 whose numbers the paper copied; it misprints DMG as DMC."""
RATIOS = (0.05, 0.1, 0.5, 1.0)
ABLATION = {
    "rho": (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    "alpha": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "beta": (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0),
}
"""FAD's search space, plus 0."""
DEMO = {
    "adam": {"lr": 2e-3},
    "sgd": {"lr": 0.05},
    "sam": {"lr": 0.05, "rho": 0.1},
    "gam": {"lr": 0.05, "rho": 0.1, "alpha": 0.5},
    "fad": {"lr": 0.05, "rho": 0.1, "alpha": 0.5, "beta": 0.5},
}
"""Options for a small network trained from scratch, tuned without the held-out domains."""

ON_CPU = {"space": "fair", "options": {"device": "cpu", "batch_size": 16}}


def fad_arm(option: str, value: float, *overrides: str) -> Arm:
    """FAD with one option set to a value."""
    own = f"optimizer.{option}={value:g}"
    label = f"{option} {value:g}"
    return Arm(("fad",), f"{option}{value:g}", label, value, overrides=(own, *overrides))


CATALOG = (
    Experiment(
        "figure-1",
        "accuracy of the optimizers on PACS and DomainNet",
        ("PACS", "DomainNet"),
        (Arm(OPTIMIZERS),),
        label="fig:intro-pacs-domainnet",
        tables=("table1", *DETAILS),
        figure=figures.methods,
    ),
    Experiment(
        "table1",
        "accuracy of the optimizers on all datasets, and by target",
        DATASETS,
        (Arm(OPTIMIZERS),),
        label="tab:dg-optimizer",
        tables=("table1", *DETAILS, "table1-nico"),
        figure=figures.methods,
    ),
    Experiment(
        "table2",
        "optimizers under CORAL, SWAD, Fishr, EoA and RSC, and seven older methods",
        DATASETS[:5],
        (
            Arm(("adam", "adamw", "sgd", "fad"), algorithms=("CORAL", "Fishr", "RSC")),
            Arm(("adam", "adamw", "sgd", "fad"), averaging=("swad", "sma")),
            Arm(("adam",), algorithms=OLDER),
        ),
        label="tab:dg-all",
        tables=("table2",),
        scaled={
            "small": {"trials": 2, "share": 0.03, "factors": (1.0, 3.0, 10.0)},
            "smoke": LONG["smoke"],
        },
    ),
    Experiment(
        "table3",
        "accuracy and training time after 5,000, 10,000 and 15,000 updates",
        ("PACS", "VLCS", "OfficeHome", "NICO++"),
        ITERATIONS,
        label="tab:dg-cost",
        tables=ITERATED,
        columns=("seconds", "over SGD"),
        scaled=LONG,
    ),
    Experiment(
        "figure-ratio",
        "accuracy against time, with FAD in 5%, 10%, 50% and 100% of the updates",
        ("PACS", "NICO++"),
        (
            Arm(("sgd", "adam", "adamw", "sam", "gam"), overrides=("batch_size=32",)),
            *(fad_arm("ratio", ratio, "batch_size=32") for ratio in RATIOS),
        ),
        label="fig:efficiency",
        figure=figures.ratio,
        columns=("seconds", "over SGD"),
        scaled={"small": {"trials": 2}},
    ),
    Experiment(
        "figure-hessian",
        "top 50 eigenvalues and trace of the Hessian after training, with target sketch",
        ("PACS",),
        (Arm(("sgd", "adam", "adamw", "gam", "sam", "fad")),),
        label="fig:hessian",
        targets="sketch",
        curvature=True,
    ),
    Experiment(
        "figure-iterations",
        "accuracy after 5,000, 10,000 and 15,000 updates, by target",
        ("PACS", "NICO++"),
        ITERATIONS,
        label="fig:iter_pacs",
        tables=ITERATED,
        figure=figures.iterations,
        scaled=LONG,
    ),
    Experiment(
        "convergence",
        "training loss against updates and against time",
        ("PACS",),
        (Arm(("sgd", "adam", "sam", "gam", "fad")),),
        figure=figures.convergence,
        scaled={"small": {"trials": 1, "evaluations": 20}},
    ),
    Experiment(
        "ablation",
        "accuracy against FAD's rho, alpha and beta, compared with SGD and Adam",
        ("PACS",),
        (
            Arm(("sgd", "adam")),
            *(fad_arm(name, value) for name, values in ABLATION.items() for value in values),
        ),
        label="fig:ablation",
        figure=figures.ablation,
        tuned=False,
        scaled={"full": {"draws": 0}, "small": {"trials": 1, "share": 0.1}},
    ),
    Experiment(
        "sensitivity",
        "accuracy of every hyperparameter sample of the search",
        ("PACS",),
        (Arm(OPTIMIZERS),),
        figure=figures.sensitivity,
        tuned=False,
        scaled={"small": {"draws": 5, "trials": 1, "share": 0.1}, "smoke": {"draws": 2}},
    ),
    Experiment(
        "demo",
        "accuracy of the optimizers on built-in drawings, leave-one-domain-out",
        ("Doodles",),
        tuple(
            Arm((name,), overrides=tuple(f"optimizer.{k}={v:g}" for k, v in options.items()))
            for name, options in DEMO.items()
        ),
        figure=figures.demo,
        columns=("passes", "seconds_per_step"),
        note="with so few seeds the standard errors are rough; times are for one thread, with one "
        "run per core in parallel. This small task shows that the methods run, what they cost and "
        "what a table looks like; it does not rank them",
        tuned=False,
        scaled={
            "small": {
                "datasets": ("Doodles",),
                "share": 2 / 3,
                "trials": 2,
                "evaluations": 4,
                **ON_CPU,
            },
            "full": {"draws": 0, **ON_CPU},
        },
    ),
)

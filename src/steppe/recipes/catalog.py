"""The tables and figures of the paper, each with its grid."""

from __future__ import annotations

from typing import Any

from .recipe import Part, Recipe

OPTIMIZERS = (
    "adam",
    "adamw",
    "sgd",
    "yogi",
    "adabelief",
    "adahessian",
    "sam",
    "gam",
    "fad",
)
"""Of Table 1, in its order."""
LONGER = ("adam", "adamw", "sgd", "yogi", "sam", "gam", "fad")
"""Of Table 3."""
SPECTRA = ("sgd", "adam", "adamw", "gam", "sam", "fad")
"""Of Figure 3."""
DATASETS = ("PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet", "NICO++")
DETAILS = ("table1-pacs", "table1-vlcs", "table1-officehome", "table1-terra", "table1-domainnet")
"""Of the appendix: Table 1 by target."""
STEPS = (5_000, 10_000, 15_000)
RATIOS = (0.05, 0.1, 0.5, 1.0)
ABLATION = {
    "rho": (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    "alpha": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "beta": (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0),
}
"""FAD's search space, and 0."""


_LONG: dict[str, dict[str, Any]] = {
    "small": {"trials": 2, "share": 0.05},
    "smoke": {"datasets": ("RotatedDigits",)},
}


def _iterations(steps: int) -> Part:
    return Part(LONGER, f"steps{steps}", steps=steps)


def _ablated(name: str, value: float) -> Part:
    given = f"optimizer.{name}={value:g}"
    return Part(("fad",), f"{name}{value:g}", f"{name} {value:g}", value, overrides=(given,))


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "figure-1",
            "accuracy of the optimizers on PACS and DomainNet",
            "fig:intro-pacs-domainnet",
            ("PACS", "DomainNet"),
            (Part(OPTIMIZERS),),
            ("table1", *DETAILS),
            figure="methods",
        ),
        Recipe(
            "table1",
            "accuracy of the optimizers on all datasets, and by target",
            "tab:dg-optimizer",
            DATASETS,
            (Part(OPTIMIZERS),),
            ("table1", *DETAILS, "table1-nico"),
            figure="methods",
        ),
        Recipe(
            "table2",
            "optimizers under CORAL, SWAD, Fishr, EoA and RSC",
            "tab:dg-all",
            DATASETS[:5],
            (
                Part(("adam", "adamw", "sgd", "fad"), algorithms=("CORAL", "Fishr", "RSC")),
                Part(("adam", "adamw", "sgd", "fad"), averaging=("swad", "sma")),
            ),
            ("table2",),
            scaled=_LONG,
        ),
        Recipe(
            "table3",
            "accuracy and training time after 5,000, 10,000 and 15,000 updates",
            "tab:dg-cost",
            ("PACS", "VLCS", "OfficeHome", "NICO++"),
            tuple(map(_iterations, STEPS)),
            ("table3", "table1-pacs", "iterations-pacs", "iterations-nico", "table1-nico"),
            timed=True,
            scaled=_LONG,
        ),
        Recipe(
            "figure-ratio",
            "FAD in 5, 10, 50 and 100 % of the updates: accuracy against time",
            "fig:efficiency",
            ("PACS", "NICO++"),
            (
                Part(("sgd", "adam", "adamw", "sam", "gam"), overrides=("batch_size=32",)),
                *(
                    Part(
                        ("fad",),
                        f"ratio{ratio:g}",
                        f"ratio {ratio:g}",
                        ratio,
                        overrides=(f"optimizer.ratio={ratio:g}", "batch_size=32"),
                    )
                    for ratio in RATIOS
                ),
            ),
            figure="ratio",
            timed=True,
            scaled={"small": {"trials": 2}},
        ),
        Recipe(
            "figure-hessian",
            "the top 50 eigenvalues and the trace of the Hessian at the end, sketch held out",
            "fig:hessian",
            ("PACS",),
            (Part(SPECTRA),),
            targets="sketch",
            curvature=True,
        ),
        Recipe(
            "figure-iterations",
            "accuracy after 5,000, 10,000 and 15,000 updates, by target",
            "fig:iter_pacs",
            ("PACS", "NICO++"),
            tuple(map(_iterations, STEPS)),
            ("table3", "table1-pacs", "iterations-pacs", "iterations-nico", "table1-nico"),
            figure="iterations",
            scaled=_LONG,
        ),
        Recipe(
            "convergence",
            "training loss against updates and against time",
            "",
            ("PACS",),
            (Part(("sgd", "adam", "sam", "gam", "fad")),),
            figure="convergence",
            scaled={"small": {"trials": 1, "evaluations": 20}},
        ),
        Recipe(
            "ablation",
            "FAD's rho, alpha and beta, beside SGD and Adam",
            "fig:ablation",
            ("PACS",),
            (
                Part(("sgd", "adam")),
                *(_ablated(name, value) for name, values in ABLATION.items() for value in values),
            ),
            figure="ablation",
            tuned=False,
            scaled={"full": {"draws": 0}, "small": {"trials": 1, "share": 0.1}},
        ),
        Recipe(
            "sensitivity",
            "accuracy over the hyper-parameters of the search",
            "",
            ("PACS",),
            (Part(OPTIMIZERS),),
            figure="sensitivity",
            tuned=False,
            scaled={
                "small": {"draws": 5, "trials": 1, "share": 0.1},
                "smoke": {"draws": 2},
            },
        ),
    )
}
"""By name."""

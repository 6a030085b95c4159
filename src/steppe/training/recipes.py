"""Recipes: settings of a run that belong together, each a small table.

A recipe leaves the algorithm and the optimizer open. Settings that you pass override its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steppe.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named table of settings.

    Attributes:
        name: what users type.
        summary: what it does, in a sentence.
        settings: config keys and their values; an axis is a name with options.
        pretrained: further settings for datasets whose networks are pretrained by default.
        citation: its paper.
    """

    name: str
    summary: str
    settings: Mapping[str, Any]
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    citation: str = ""

    def apply(self, given: Mapping[str, Any], pretrained: bool) -> dict[str, Any]:
        """Complete a config's values with the recipe's.

        Examples:
            >>> recipe = Recipe(name="mine", summary="", settings={"averaging": {"name": "sma"}})
            >>> recipe.apply({"averaging": {"start": 5}}, pretrained=False)
            {'averaging': {'name': 'sma', 'start': 5}}
            >>> recipe.apply({"averaging": {"name": "swad"}}, pretrained=False)
            {'averaging': {'name': 'swad'}}
        """
        own = {**self.settings, **(self.pretrained if pretrained else {})}
        merged = {**own, **given}
        for key, value in own.items():
            if isinstance(value, Mapping) and isinstance(options := merged[key], Mapping):
                same = options.get("name", value["name"]) == value["name"]
                merged[key] = {**value, **options} if same else options
        return merged


ERM_PLUS_PLUS = Recipe(
    name="erm++",
    summary="warm start of the classifier, plateau schedule, moving average, then a second stage "
    "on all source images",
    settings={
        "linear_steps": 500,
        "linear_lr": 5e-5,
        "lr_schedule": "plateau",
        "averaging": {"name": "sma", "start": 600, "refresh": True},
        "freeze_bn": False,
        "second_stage": True,
    },
    pretrained={"backbone": "resnet50.ram_in1k"},
    citation="Teterwak et al., ERM++: An Improved Baseline for Domain Generalization, WACV 2025",
)
LP_FT = Recipe(
    name="lp-ft",
    summary="fine-tuning from a linear probe",
    settings={"linear_probe": True},
    citation="Kumar et al., Fine-Tuning can Distort Pretrained Features and Underperform "
    "Out-of-Distribution, ICLR 2022",
)

recipes: Registry[Recipe] = Registry("recipe", lambda: (ERM_PLUS_PLUS, LP_FT))


def register_recipe(recipe: Recipe) -> Recipe:
    """Register a recipe; call it in a module passed to ``--plugin``."""
    return recipes.add(recipe)

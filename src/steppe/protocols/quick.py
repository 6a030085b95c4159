"""Ours: enough runs for an interval over seeds, few and short enough for an afternoon."""

from .protocol import OWN, Protocol, Rule

_SMALL = dict.fromkeys(("RotatedMNIST", "ColoredMNIST", "RotatedDigits", "Doodles"), OWN)
_SCALE = "ours: as 'steppe reproduce --scale small'"

PROTOCOL = Protocol(
    name="quick",
    about="tuned defaults, a fifth of the usual steps, 3 seeds: an answer on one GPU in an hour",
    citation="",
    rules={
        "targets": Rule("single", "DomainBed"),
        "trials": Rule(3, "ours: the fewest seeds whose interval decides a comparison"),
        "split": Rule("domainbed", "DomainBed"),
        "draws": Rule(0, "ours: no search"),
        "space": Rule("fair", "ours: measured defaults of each optimizer"),
        "selection": Rule("train-val", "DomainBed"),
        "steps": Rule(1001, _SCALE, datasets={"NICO++": 2001, "DomainNet": 3001, **_SMALL}),
        "checkpoint_every": Rule(200, _SCALE, datasets={"NICO++": 400, "DomainNet": 600, **_SMALL}),
    },
    note="The hour holds for five optimizers on a dataset as small as PACS, with ResNet-50 on an "
    "H200 (estimated from the times of their steps). Defaults were tuned on PACS and Doodles.",
)

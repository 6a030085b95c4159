"""An algorithm of one's own: trained by one process, loaded by another that has to find it."""

import os
from pathlib import Path

import torch

from steppe.training import evaluate_run, load_model, make_config, train
from tests import processes

PLUGIN = """
from typing import Annotated

from torch.nn import functional as F
from steppe.algorithms import Algorithm, Losses, register_algorithm
from steppe.options import Option
from steppe.search import LogUniform


@register_algorithm("Doubled", citation="you")
class Doubled(Algorithm):
    def __init__(
        self, network, n_domains, penalty: Annotated[float, Option(LogUniform(-2, 0))] = 0.1
    ):
        super().__init__(network, n_domains)
        self.penalty = penalty

    def forward(self, prepared, objective="main", first=None):
        logits = self.network(prepared.images, prepared.keep)
        risk = F.cross_entropy(logits, prepared.labels)
        size = logits.square().mean()
        return Losses(risk + self.penalty * size, {"size": size})

    def predict(self, images):
        return 2 * self.network(images)

"""


def train_it(folder: Path) -> None:
    # As for the installed command, this folder is not where Python looks for modules.
    os.chdir(folder)
    values = {"dataset": "RotatedDigits", "targets": "75", "steps": 2, "batch_size": 4}
    values |= {"plugins": ["my_algorithms"], "algorithm": {"name": "doubled", "penalty": 0.5}}
    (_, record) = train(make_config({**values, "device": "cpu"}), "run")
    assert record["loss"]["size"] > 0


def load_it(folder: Path) -> None:
    os.chdir(folder)
    model = load_model("run")
    assert type(model.algorithm).__module__ == "my_algorithms"
    assert model.algorithm.penalty == 0.5
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(images), 2 * model.algorithm.network(images))
    assert list(evaluate_run("run", device="cpu")) == ["75"]


def test_trained_here_and_loaded_there(tmp_path: Path) -> None:
    (tmp_path / "my_algorithms.py").write_text(PLUGIN)
    for work in (train_it, load_it):
        processes.run(work, tmp_path)

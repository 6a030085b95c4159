"""An algorithm of one's own: trained by one process, loaded by another that has to find it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.limits import seconds

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
TRAIN = """
from steppe.training import make_config, train
values = {"dataset": "RotatedDigits", "targets": "75", "steps": 2, "batch_size": 4}
values |= {"plugins": ["my_algorithms"], "algorithm": {"name": "doubled", "penalty": 0.5}}
(_, record) = train(make_config({**values, "device": "cpu"}), "run")
assert record["loss"]["size"] > 0
"""
LOAD = """
import torch
from steppe.training import evaluate_run, load_model
model = load_model("run")
assert type(model.algorithm).__module__ == "my_algorithms"
assert model.algorithm.penalty == 0.5
images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
with torch.no_grad():
    assert torch.equal(model(images), 2 * model.algorithm.network(images))
assert list(evaluate_run("run", device="cpu")) == ["75"]
"""


def test_trained_here_and_loaded_there(tmp_path: Path) -> None:
    (tmp_path / "my_algorithms.py").write_text(PLUGIN)
    for program in (TRAIN, LOAD):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            # As for the installed command, this folder is not where Python looks for modules.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=seconds(600),
        )
        assert done.returncode == 0, done.stderr

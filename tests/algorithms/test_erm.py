"""ERM against the obvious formula, and the defaults of the contract."""

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import ERM, algorithm_names, build_algorithm
from steppe.algorithms.algorithm import trainable
from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.training.backbones import build_network

SIZES = (4, 7, 1)
"""Images of each domain: the mean is over images, whichever domain they are from."""


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=generator),
            torch.randint(0, 5, (n,), generator=generator),
        )
        for n in SIZES
    ]


def algorithm(name: str = "ERM") -> ERM:
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=5, image_size=8)
    with torch.no_grad():
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):  # statistics that are not zeros and ones
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
    built = build_algorithm(name, network, len(SIZES)).double()
    assert type(built) is ERM
    return built


def by_hand(erm: ERM, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of -log p(label), one image at a time, and its derivative by the logits."""
    logits = torch.cat([erm.network.classifier(erm.network.featurizer(x[None])) for x in images])
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    losses = [-p[i, label].log() for i, label in enumerate(labels.tolist())]
    return sum(losses) / len(losses), (p - nn.functional.one_hot(labels, 5)) / len(labels)


def test_loss_and_gradient_are_the_formulas():
    erm, other = algorithm(), algorithm()
    losses = erm(erm.prepare(batches()))
    losses.total.backward()

    pixels = torch.cat([batch.images for batch in batches()]).double() / 255
    labels = torch.cat([batch.labels for batch in batches()])
    expected, by_logits = by_hand(other, pixels, labels)
    expected.backward()

    assert losses.total.dtype == torch.float64
    torch.testing.assert_close(losses.total, expected, rtol=1e-12, atol=0)
    found = dict(erm.named_parameters())
    for name, parameter in other.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-10, atol=1e-14)
    # The classifier's by hand to the end: the derivative by the logits times the features.
    features = other.network.featurizer(pixels)
    torch.testing.assert_close(
        erm.network.classifier.weight.grad, (by_logits.T @ features), rtol=1e-10, atol=1e-14
    )


def test_one_objective_over_every_parameter():
    erm = algorithm()
    (objective,) = erm.objectives()
    assert objective.name == "main"
    assert objective.active(0)
    assert list(map(id, objective.parameters)) == list(map(id, erm.parameters()))
    erm.network.featurizer.requires_grad_(False)
    (objective,) = erm.objectives()
    assert list(objective.parameters) == list(trainable(erm))
    assert len(objective.parameters) == 2


def test_names():
    assert "ERM" in algorithm_names()
    assert algorithm("erm").n_domains == len(SIZES)
    with pytest.raises(UserError, match="unknown algorithm 'ERMS', did you mean 'ERM'"):
        build_algorithm("ERMS", algorithm().network, 1)

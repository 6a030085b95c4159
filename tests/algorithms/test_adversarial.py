"""DANN, CDANN and SagNet against their formulas, image by image, objective by objective."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Algorithm, Prepared, build_algorithm
from steppe.domains.store import Host
from steppe.training import RunDirectory, make_config
from steppe.training.processes import Processes
from steppe.training.trainer import Trainer
from tests.algorithms.oracles import (
    N_CLASSES,
    Image,
    cross_entropy,
    features,
    gradients,
    images_of,
    make_batches,
    make_network,
    mean,
    move,
    risk,
)

SIZES = (5, 7, 4)
ADVERSARIAL: list[tuple[str, float, dict[str, Any]]] = [
    ("DANN", 0.0, {}),
    ("DANN", 0.5, {"penalty": 0.3, "grad_penalty": 0.7, "depth": 4, "dropout": 0.5}),
    ("CDANN", 0.0, {"penalty": 2.0, "depth": 2}),
    ("CDANN", 0.5, {"penalty": 0.3, "grad_penalty": 0.7, "dropout": 0.25}),
]
"""Names, the network's dropout, options."""


def make_algorithm(name: str, dropout: float = 0.0, /, **options: Any) -> Algorithm:
    network = make_network(dropout)
    if "DANN" in name:
        options = {"width": 8, **options}
    algorithm = build_algorithm(name, network, len(SIZES), **options).double()
    move(algorithm, 1)  # no two parameters alike
    return algorithm


def make_prepared(algorithm: Algorithm) -> tuple[Prepared, list[list[Image]]]:
    """A step's, with no image of classes 1 and 4: balance is by what there is."""
    batches = [
        batch._replace(labels=batch.labels * (batch.labels % 3 != 1)) for batch in make_batches()
    ]
    assert {int(y) for batch in batches for y in batch.labels} == {0, 2, 3}
    torch.manual_seed(2)
    prepared = algorithm.prepare(batches)
    return prepared, images_of(batches, prepared.keep)


def assert_objective(
    algorithm: Algorithm, prepared: Prepared, objective: str, expected: Tensor, *learns: nn.Module
) -> None:
    """Compares the loss and its gradient; the parameters are those of the modules that learn."""
    found = algorithm(prepared, objective).total
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    for a, b in zip(gradients(found, algorithm), gradients(expected, algorithm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * float(b.abs().max()))
    (own,) = (o for o in algorithm.objectives() if o.name == objective)
    assert {*own.parameters} == {*chain(*(module.parameters() for module in learns))}
    for gradient in torch.autograd.grad(expected, own.parameters, retain_graph=True):
        assert gradient.abs().max() > 0


def assert_leaves_alone(loss: Tensor, *modules: nn.Module) -> None:
    """No gradient, not even one that is zero: a backward pass would be wasted on it."""
    parameters = list(chain(*(module.parameters() for module in modules)))
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    assert parameters
    assert found == (None,) * len(parameters)


def discriminator_loss(
    algorithm: Any, domains: list[list[Image]], masks: tuple[Tensor, ...], frozen: bool
) -> Tensor:
    """D of the docstrings."""
    conditional = hasattr(algorithm, "class_vectors")
    labels = [image.label for domain in domains for image in domain]
    losses, weights, slopes = [], [], []
    for i, (d, image) in enumerate((d, x) for d, domain in enumerate(domains) for x in domain):
        phi = features(algorithm.network, image)
        seen = phi.detach().requires_grad_() if frozen else phi
        if conditional:
            seen = seen + algorithm.class_vectors.weight[image.label]
        x = seen
        for k, layer in enumerate(algorithm.discriminator.layers):
            if k > 0:
                x = torch.where(x > 0, x, 0)
            x = layer.weight @ x + layer.bias
            if masks and k < len(masks):
                x = x * masks[k][i]
        losses.append(cross_entropy(x, d))
        (slope,) = torch.autograd.grad(losses[-1], seen, create_graph=True)
        slopes.append((slope**2).sum())
        n_y = labels.count(image.label)
        weights.append(1 / (n_y * N_CLASSES) if conditional else 1 / len(labels))
    balanced = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    return balanced + algorithm.grad_penalty * mean(slopes)


def pooled_risk(algorithm: Algorithm, domains: list[list[Image]]) -> Tensor:
    return risk(algorithm.network, chain(*domains))


@pytest.mark.parametrize(("name", "dropout", "options"), ADVERSARIAL)
def test_both_losses_of_the_adversaries(name, dropout, options):
    algorithm: Any = make_algorithm(name, dropout, **options)
    prepared, domains = make_prepared(algorithm)
    masks = prepared.draws["masks"]
    adversary = [algorithm.discriminator, *([algorithm.class_vectors] if name == "CDANN" else [])]
    assert len(algorithm.discriminator.layers) == options.get("depth", 3)
    assert len(masks) == (options.get("depth", 3) - 1 if options.get("dropout") else 0)

    loss = discriminator_loss(algorithm, domains, masks, frozen=True)
    if name == "CDANN":  # the vectors of classes that are not in the batch have zeros
        (found,) = torch.autograd.grad(loss, algorithm.class_vectors.weight, retain_graph=True)
        assert (found.abs().amax(1) > 0).tolist() == [True, False, True, True, False]
    assert_objective(algorithm, prepared, "discriminator", loss, *adversary)
    assert_leaves_alone(algorithm(prepared, "discriminator").total, algorithm.network)

    loss = discriminator_loss(algorithm, domains, masks, frozen=False)
    total = pooled_risk(algorithm, domains) - options.get("penalty", 1.0) * loss
    assert_objective(algorithm, prepared, "main", total, algorithm.network)
    parts = algorithm(prepared).parts
    torch.testing.assert_close(parts["risk"], pooled_risk(algorithm, domains))
    torch.testing.assert_close(parts["adversary"], loss)


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
def test_without_a_penalty_the_network_minimizes_its_risk(name):
    algorithm = make_algorithm(name, penalty=0.0, grad_penalty=0.5)
    prepared, domains = make_prepared(algorithm)
    expected = pooled_risk(algorithm, domains)
    assert_objective(algorithm, prepared, "main", expected, algorithm.network)


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
@pytest.mark.parametrize("d_steps", [1, 2, 5])
def test_turns_are_domainbeds(name, d_steps):
    discriminator, main = make_algorithm(name, d_steps=d_steps).objectives()
    assert (discriminator.name, main.name) == ("discriminator", "main")
    steps = range(4 * (1 + d_steps))
    turns = [(step + 1) % (1 + d_steps) < d_steps for step in steps]  # update_count, from 1
    assert [discriminator.active(step) for step in steps] == turns
    assert [main.active(step) for step in steps] == [not turn for turn in turns]
    assert sum(turns) == 4 * d_steps
    assert not any(o.reset(step) for o in (discriminator, main) for step in steps)


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"beta1": 0.0}, {}),
        ({"lr": 1e-4, "weight_decay": 0.0}, {"lr": 1e-4, "weight_decay": 0.0}),
    ],
)
def test_options_for_the_optimizers(given, own):
    discriminator, main = make_algorithm("CDANN", **given).objectives()
    betas = {"betas": (given.get("beta1", 0.5), 0.9)}
    assert discriminator.options == betas | own
    assert main.options == betas


def test_the_discriminators_dropout_is_drawn_beforehand():
    dann: Any = make_algorithm("DANN", dropout=0.25, depth=3, width=100)
    torch.manual_seed(0)
    first, second = dann.discriminator.draw_masks(torch.zeros(50, dtype=torch.float64))
    for mask in (first, second):
        assert mask.shape == (50, 100)
        kept = mask[mask != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 4 / 3), rtol=1e-15, atol=0)
        assert mask.mean() == pytest.approx(1, abs=0.04)  # of 5000: five deviations
    assert not torch.equal(first, second)
    assert dann.eval().discriminator.draw_masks(torch.zeros(50)) == ()


def style(phi: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one image's features; the variance is DomainBed's, over n - 1."""
    mu = phi.sum() / len(phi)
    return mu, ((phi - mu) ** 2).sum() / (len(phi) - 1)


def stylized(content_of: Tensor, mu: Tensor, var: Tensor) -> Tensor:
    own_mu, own_var = style(content_of)
    return (content_of - own_mu) / (own_var + 1e-5) ** 0.5 * (var + 1e-5) ** 0.5 + mu


def sagnet_losses(algorithm: Any, prepared: Prepared, domains: list[list[Image]]) -> dict[str, Any]:
    images = list(chain(*domains))
    network, head = algorithm.network, algorithm.style
    phis = [features(network, image) for image in images]
    losses: dict[str, list[Tensor]] = {"main": [], "style": [], "adversarial": []}
    for i, image in enumerate(images):
        partner, share = (x[i] for x in prepared.draws["main"])
        pairs = zip(style(phis[i]), style(phis[partner]), strict=True)
        mixed = stylized(phis[i], *(share * own + (1 - share) * other for own, other in pairs))
        content = network.classifier.weight @ mixed + network.classifier.bias
        losses["main"].append(cross_entropy(content, image.label))

        partner = prepared.draws["style"].partner[i]
        other = stylized(phis[partner], *style(phis[i])).detach()
        losses["style"].append(cross_entropy(head.weight @ other + head.bias, image.label))

        # Into the features by way of the style alone: the other's content is a constant.
        partner = prepared.draws["adversarial"].partner[i]
        other = head.weight @ stylized(phis[partner].detach(), *style(phis[i])) + head.bias
        to_uniform = mean(cross_entropy(other, c) for c in range(N_CLASSES))
        losses["adversarial"].append(algorithm.penalty * to_uniform)
    return {name: mean(values) for name, values in losses.items()}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_three_losses_of_sagnet(dropout):
    sagnet: Any = make_algorithm("SagNet", dropout, penalty=0.7)
    prepared, domains = make_prepared(sagnet)
    expected = sagnet_losses(sagnet, prepared, domains)
    network = sagnet.network
    assert [o.name for o in sagnet.objectives()] == ["main", "style", "adversarial"]  # in turn
    assert_objective(sagnet, prepared, "main", expected["main"], network)
    assert_objective(sagnet, prepared, "style", expected["style"], sagnet.style)
    assert_objective(sagnet, prepared, "adversarial", expected["adversarial"], network.featurizer)
    assert_leaves_alone(sagnet(prepared, "main").total, sagnet.style)
    assert_leaves_alone(sagnet(prepared, "style").total, network)
    assert_leaves_alone(sagnet(prepared, "adversarial").total, network.classifier)


def test_every_step_of_sagnet_makes_three_updates_with_two_optimizers():
    objectives = make_algorithm("SagNet").objectives()
    assert all(o.active(step) for o in objectives for step in range(5))
    assert [o.optimizer for o in objectives] == [None, None, "main"]
    assert not any(o.options for o in objectives)


def trained_featurizer(folder: Path, penalty: float) -> Tensor:
    """SagNet's weights after a few steps of Adam, one after the other."""
    values = {
        "dataset": "RotatedDigits",
        "targets": "75",
        "algorithm": {"name": "SagNet", "penalty": penalty},
        "optimizer": "adam",
        "steps": 5,
        "checkpoint_every": 5,
        "batch_size": 8,
        "device": "cpu",
    }
    run = RunDirectory(folder / str(penalty))
    config = make_config(values)
    run.create(config)
    trainer = Trainer(config, run, Processes(torch.device("cpu")), "fp32")
    sagnet: Any = trainer.algorithm
    style_before = sagnet.style.weight.clone()
    for batches in Host(torch.device("cpu")).batches(trainer.sampling, range(config.steps)):
        trainer.step(batches)
    assert not torch.equal(sagnet.style.weight, style_before)
    return torch.cat([p.detach().flatten() for p in sagnet.network.featurizer.parameters()])


def test_sagnets_penalty_counts_under_adam(tmp_path: Path):
    """An Adam of its own would take steps of one length, whatever the penalty is."""
    without, small, large = (trained_featurizer(tmp_path, w) for w in (0.0, 0.001, 10.0))
    assert 0 < (small - without).norm() < 0.1 * (large - without).norm()


def test_own_style_changes_nothing():
    sagnet = make_algorithm("SagNet")
    prepared, domains = make_prepared(sagnet)
    swap = prepared.draws["main"]
    prepared = replace(prepared, draws={"main": swap._replace(share=torch.ones_like(swap.share))})
    assert_objective(sagnet, prepared, "main", pooled_risk(sagnet, domains), sagnet.network)


def test_sagnets_draws():
    sagnet = make_algorithm("SagNet")
    n = sum(SIZES)
    torch.manual_seed(0)
    swaps = [swap for _ in range(100) for swap in sagnet.prepare(make_batches()).draws.values()]
    assert len(swaps) == 300
    for swap in swaps:
        assert sorted(swap.partner.tolist()) == list(range(n))
        assert swap.share.shape == (n, 1)
    assert len({tuple(swap.partner.tolist()) for swap in swaps}) == 300
    shares = torch.stack([swap.share for swap in swaps])
    assert shares.dtype == torch.float64
    assert shares.min() >= 0
    assert shares.max() <= 1
    assert shares.mean() == pytest.approx(1 / 2, abs=0.02)  # of 4800: five deviations
    assert shares.var() == pytest.approx(1 / 12, abs=0.006)
    partners = torch.stack([swap.partner for swap in swaps]).double()
    assert partners.mean(0).tolist() == pytest.approx([(n - 1) / 2] * n, abs=1.4)

"""RDM: the losses of the worst domain beside all losses."""

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.algorithms import Algorithm, Prepared, build_algorithm
from steppe.algorithms.algorithm import domain_risks
from tests.algorithms.oracles import gradients, make_batches, make_network, move

OPTIONS = {"penalty": 3.0, "variance": 0.5, "anneal_steps": 1}


def built() -> tuple[Algorithm, Prepared]:
    """After its first step, with batches of 5, 7 and 4 images."""
    algorithm = build_algorithm("RDM", make_network(), 3, **OPTIONS).double()
    for seed in range(2):
        prepared = algorithm.prepare(make_batches(seed=seed))
        if seed == 0:
            algorithm.commit(prepared, {"main": algorithm(prepared)})
    return algorithm, prepared


def by_definition(algorithm: Algorithm, prepared: Prepared, worst: int) -> Tensor:
    logits = algorithm.network(prepared.images)
    r = F.cross_entropy(logits, prepared.labels, reduction="none")
    r2 = prepared.split(r)[worst]

    def k(xs: Tensor, ys: Tensor) -> Tensor:
        squared = (xs[:, None] - ys) ** 2
        return sum(torch.exp(-(10.0**power) * squared) for power in range(-4, 4)).mean()

    distance = k(r, r) + k(r2, r2) - 2 * k(r, r2)
    return domain_risks(logits, prepared).mean() + 3 * distance + 0.5 * (r.var() + r2.var())


def test_the_first_pass_chooses_the_worst_domain():
    algorithm, prepared = built()
    risks = domain_risks(algorithm.network(prepared.images), prepared)
    first = algorithm(prepared)
    worst = int(first.aux["worst"])
    assert worst == int(risks.argmax())
    for domain in range(3):
        found = algorithm(prepared, "main", {"worst": torch.tensor(domain)}).total
        expected = by_definition(algorithm, prepared, domain)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for a, b in zip(gradients(found, algorithm), gradients(expected, algorithm), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)
    seed = 0
    while int(algorithm(prepared).aux["worst"]) == worst:  # until another domain is the worst
        move(algorithm, seed)
        seed += 1
    again = algorithm(prepared, "main", first.aux)
    assert int(again.aux["worst"]) == worst
    torch.testing.assert_close(again.total, by_definition(algorithm, prepared, worst))


def test_before_annealing_it_is_the_mean_risk():
    algorithm = build_algorithm("RDM", make_network(), 3, **OPTIONS).double()
    prepared = algorithm.prepare(make_batches())
    found = algorithm(prepared).total
    expected = domain_risks(algorithm.network(prepared.images), prepared).mean()
    assert torch.equal(found, expected)
    for a, b in zip(gradients(found, algorithm), gradients(expected, algorithm), strict=True):
        assert torch.equal(a, b)


def test_equal_domains_are_no_distance_apart():
    algorithm = build_algorithm("RDM", make_network(), 3).double()
    different, same = (
        algorithm(algorithm.prepare(batches)).parts["distance"]
        for batches in (make_batches(), [make_batches()[0]] * 3)
    )
    assert abs(same) < 1e-14 < 1e-4 < different


def test_annealing_ends_with_a_reset_and_a_lower_learning_rate():
    (objective,) = build_algorithm("RDM", make_network(), 3, **OPTIONS).objectives()
    assert [step for step in range(9) if objective.reset(step)] == [1]
    assert objective.lr_steps == {1: 0.3}

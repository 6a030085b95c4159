"""The demo trains every optimizer it names on digits that no two domains share."""

import torch

from steppe import demo
from steppe.optim import optimizer_spec


def test_domains_are_disjoint_rotations():
    domains = demo.rotated_digits()
    assert tuple(domains) == demo.ANGLES
    assert sum(len(y) for _, y in domains.values()) == 1797
    upright, tilted = domains[0][0][:1], domains[45][0]
    assert demo._rotate(upright, 0).sub(upright).abs().max() < 1e-6
    assert (demo._rotate(upright, 90) - upright.rot90(1, (2, 3))).abs().max() < 1e-5
    assert tilted.shape[1:] == (1, 8, 8)


def test_the_table_has_a_row_for_each_optimizer(monkeypatch, capsys):
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "SEEDS", 2)
    demo.run()
    printed = capsys.readouterr().out
    for name in demo.OPTIMIZERS:
        assert name in printed
        assert str(optimizer_spec(name).passes) in printed
    assert "unseen" in printed


def test_training_learns(monkeypatch):
    monkeypatch.setattr(demo, "STEPS", 60)
    torch.manual_seed(0)
    result = demo.train("fad", 0, demo.rotated_digits())
    assert result.seen > 60  # of ten classes

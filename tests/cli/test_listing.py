"""`steppe list`: every registry by name, and one entry with its options."""

import json
import re

import pytest

from steppe.cli.listing import KINDS
from steppe.optim import optimizer_names, optimizer_spec
from steppe.training.backbones import build_network
from steppe.training.zoo import BACKBONES


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_list_has_every_name_of_its_registry_on_a_line(steppe, kind):
    code, out, _ = steppe("list", kind)
    assert code == 0
    names = list(KINDS[kind].registry)
    lines = out.splitlines()[2:]
    assert [line.split()[0] for line in lines[: len(names)]] == names
    code, out, _ = steppe("list", kind, "--json")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == names
    assert all(row["summary"] and "citation" in row for row in rows)
    # No marks of code or mathematics reach the terminal.
    assert not set("$\\`") & set("".join(row["summary"] for row in rows))


def test_optimizers_can_be_read_on_a_narrow_terminal(steppe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("steppe.console.Console.is_terminal", True)
    _, out, _ = steppe("list", "optimizers")
    out = re.sub(r"\x1b\[\d+m", "", out)
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 5 * len(optimizer_names())
    assert "Foret et al.," in out  # the title is shown with the optimizer's options
    assert "Sharpness-Aware" not in out
    assert re.search(r"(?m)^looksam .* 1\.2 +0$", out)


def test_without_a_kind_the_kinds_are_counted(steppe):
    code, out, _ = steppe("list", "--json")
    assert code == 0
    assert json.loads(out)["optimizers"] == len(optimizer_names())
    assert "steppe list backbones" in steppe("list")[1]


def test_a_name_in_place_of_a_kind_is_found(steppe):
    code, _, err = steppe("list", "fad")
    assert code == 2
    assert "steppe list optimizers fad" in err


def test_optimizers_say_their_passes(steppe):
    rows = json.loads(steppe("list", "optimizers", "--json")[1])
    products = {row["name"]: row["hessian_products"] for row in rows if row["hessian_products"]}
    assert products == {"adahessian": 1, "gam-exact": 2}
    assert {row["name"]: row["passes"] for row in rows} == {
        name: optimizer_spec(name).passes for name in optimizer_names()
    }


def test_one_optimizer_shows_the_default_range_and_meaning_of_each_option(steppe):
    code, out, _ = steppe("list", "optimizers", "FAD")
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.startswith("optimizer.alpha")]
    assert {"0.5", "1.0}"} <= set(row.split())
    assert "at least 0 and at most 1" in row
    assert "share of zeroth-order flatness" in row
    for key in ("lr", "momentum", "ratio"):
        assert f"optimizer.{key} " in out
    facts = json.loads(steppe("list", "optimizers", "fad", "--json")[1])
    assert facts["options"]["rho"]["default"] == 0.05
    assert facts["options"]["rho"]["search"] == "{0.05, 0.1, 0.2, 0.5, 1.0, 2.0}"
    assert facts["options"]["lr"]["meaning"] == "learning rate; 0.02 from scratch (--weights none)"
    assert facts["others"] == "torch.optim.SGD"


def test_options_that_follow_the_optimizers_say_so(steppe):
    _, out, _ = steppe("list", "algorithms", "dann")
    (row,) = [line for line in out.splitlines() if line.startswith("algorithm.lr")]
    assert "the optimizer's" in row
    assert "It has no options." in steppe("list", "algorithms", "ERM")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optimizer",), "did you mean 'optimizers'?"),
        (("fda",), "did you mean 'fad'? It is listed under optimizers: steppe list optimizers fad"),
        (("optimizers", "fda"), "did you mean 'fad'?"),
        (("backbones", "nothing-of-the-kind"), "no backbone name contains 'nothing-of-the-kind'"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(steppe, words, said):
    code, _, err = steppe("list", *words)
    assert code == 2
    assert said in err


def test_a_plugins_entry_is_listed(steppe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listed_plugin.py").write_text(
        "from steppe.optim import SAM, register_optimizer\n"
        "@register_optimizer('listed', passes=2, citation='Mine, 2026')\n"
        "class Listed(SAM):\n"
        "    '''A method of mine.'''\n"
    )
    try:
        _, out, _ = steppe("list", "optimizers", "--plugin", "listed_plugin")
    finally:
        KINDS["optimizers"].registry._table.pop("listed", None)
    assert "A method of mine." in out
    assert "Mine, 2026" in out


def test_any_part_of_a_name_finds_backbones_of_timm(steppe):
    rows = json.loads(steppe("list", "backbones", "efficientnet_lite0", "--json")[1])
    assert {"name": "tf_efficientnet_lite0", "library": "timm", "pretrained": True} in rows


@pytest.mark.parametrize(
    ("name", "size", "outputs", "mean"),
    [
        ("vit_base_patch16_clip_224.openai", 224, 512, 0.4814),
        ("vit_base_patch16_siglip_224", 224, 0, 0.5),
        ("vit_base_patch14_dinov2", 518, 0, 0.485),
        ("vit_base_patch16_dinov3", 256, 0, 0.485),
        ("vit_base_patch16_224.mae", 224, 0, 0.485),
    ],
)
def test_a_timm_backbone_shows_its_own_preprocessing(steppe, name, size, outputs, mean):
    facts = json.loads(steppe("list", "backbones", name, "--json")[1])[0]
    assert facts["name"] == name
    assert facts["image_size"] == size
    assert facts["head_outputs"] == outputs
    assert facts["mean"][0] == pytest.approx(mean, abs=1e-3)
    assert facts["pretrained"]
    shown = steppe("list", "backbones", name)[1]
    assert f"image size: {size}" in shown
    assert f"outputs of its own head: {outputs}" in shown


@pytest.mark.parametrize("name", list(BACKBONES))
def test_a_backbone_has_the_parameters_that_are_listed(name):
    size, channels = {"small-cnn": (8, 1), "mnist-cnn": (28, 1)}.get(name, (64, 3))
    network = build_network(name, n_classes=3, image_size=size, channels=channels)
    assert sum(p.numel() for p in network.featurizer.parameters()) == BACKBONES[name].parameters

"""Weight files as published: every known layout gives the same bits, others name the nearest."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm")

import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torchvision import models

from steppe.errors import UserError
from steppe.training.backbones import build_network
from steppe.training.weights import load_weights

State = dict[str, Tensor]
VIT = "vit_tiny_patch16_224"
CLIP = "vit_xsmall_patch16_clip_224.tinyclip_yfcc15m"


def noise(model: nn.Module, seed: int = 3) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }


@functools.cache
def resnet() -> State:
    model = models.resnet18()
    model.fc = nn.Identity()
    return noise(model)


@functools.cache
def vit(name: str = VIT) -> State:
    return noise(timm.create_model(name, num_classes=0))


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{key}": value for key, value in state.items()}


def perceptron(name: str) -> State:
    return {f"{name}.0.weight": torch.zeros(8, 512), f"{name}.2.weight": torch.zeros(8, 8)}


def zeros(state: State) -> State:
    return {key: torch.zeros_like(value) for key, value in state.items()}


def moco_v2() -> Any:
    rivals = under("module.encoder_k.", zeros({**resnet(), **perceptron("fc")}))
    queue = {"module.queue": torch.zeros(128, 16), "module.queue_ptr": torch.zeros(1)}
    query = under("module.encoder_q.", {**resnet(), **perceptron("fc")})
    return {"epoch": 200, "arch": "resnet18", "state_dict": {**rivals, **query, **queue}}


def moco_v3() -> Any:
    base = under("module.base_encoder.", {**vit(), **perceptron("head")})
    rival = under("module.momentum_encoder.", zeros({**vit(), **perceptron("head")}))
    return {
        "epoch": 300,
        "state_dict": {**rival, **base, **under("module.", perceptron("predictor"))},
    }


def dino() -> Any:
    """A full checkpoint, whose weights to use are the teacher's."""
    head = under("head.mlp.", perceptron("x"))
    return {
        "student": under("module.", under("backbone.", zeros(vit())) | head),
        "teacher": under("backbone.", vit()) | head,
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_tiny", lr=0.1),
    }


def dinov2() -> Any:
    return {**vit(), "mask_token": torch.zeros(1, 192)}


def mae() -> Any:
    decoder = {"decoder_embed.weight": torch.zeros(8, 192), "decoder_pos_embed": torch.zeros(1)}
    return {"model": {**vit(), **decoder, "mask_token": torch.zeros(1, 1, 192)}}


def siglip() -> Any:
    return {**under("visual.trunk.", vit()), "logit_scale": torch.ones([]), **perceptron("text")}


PUBLISHED: dict[str, tuple[str, Callable[[], Any], Callable[[], State]]] = {
    "torchvision": ("resnet18", lambda: {**resnet(), "fc.bias": torch.zeros(9)}, resnet),
    "timm": (VIT, lambda: {**vit(), "head.weight": torch.zeros(9, 192)}, vit),
    "MoCo-v2": ("resnet18", moco_v2, resnet),
    "MoCo-v2, the query alone": ("resnet18", lambda: under("module.encoder_q.", resnet()), resnet),
    "MoCo-v3": (VIT, moco_v3, vit),
    "compiled around DataParallel": (
        "resnet18",
        lambda: under("_orig_mod.module.", resnet()),
        resnet,
    ),
    "DINO": (VIT, dino, vit),
    "DINO's student": (VIT, lambda: {"student": under("module.backbone.", vit())}, vit),
    "DINOv2": (VIT, dinov2, vit),
    "MAE": (VIT, mae, vit),
    "SigLIP in OpenCLIP": (VIT, siglip, vit),
}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_a_published_file_gives_the_backbone_its_weights(tmp_path, layout):
    name, file, expected = PUBLISHED[layout]
    torch.save(file(), tmp_path / "w.pth")
    size = 224 if name == VIT else 32
    network = build_network(name, n_classes=5, image_size=size, weights=str(tmp_path / "w.pth"))
    found = network.featurizer.state_dict()
    assert found.keys() == expected().keys()
    for key, value in expected().items():
        assert torch.equal(found[key], value), key


@functools.cache
def openai_clip() -> State:
    """OpenAI's and OpenCLIP's names, with text keys beside."""
    model = timm.create_model(CLIP)
    width = model.embed_dim
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def norm(name: str) -> State:
        return {f"{name}.weight": draw(width), f"{name}.bias": draw(width)}

    def linear(name: str, out: int, into: int) -> State:
        return {f"{name}.weight": draw(out, into), f"{name}.bias": draw(out)}

    state = {
        "logit_scale": torch.ones([]),
        "text_projection": draw(4, 4),
        "transformer.resblocks.0.ln_1.weight": draw(4),
        "visual.class_embedding": draw(width),
        "visual.positional_embedding": draw(model.pos_embed.shape[1], width),
        "visual.conv1.weight": draw(*model.patch_embed.proj.weight.shape),
        "visual.proj": draw(width, model.num_classes),
        **norm("visual.ln_pre"),
        **norm("visual.ln_post"),
    }
    hidden = model.blocks[0].mlp.fc1.out_features
    for number in range(len(model.blocks)):
        block = f"visual.transformer.resblocks.{number}"
        state |= {
            f"{block}.attn.in_proj_weight": draw(3 * width, width),
            f"{block}.attn.in_proj_bias": draw(3 * width),
            **linear(f"{block}.attn.out_proj", width, width),
            **linear(f"{block}.mlp.c_fc", hidden, width),
            **linear(f"{block}.mlp.c_proj", width, hidden),
            **norm(f"{block}.ln_1"),
            **norm(f"{block}.ln_2"),
        }
    return state


def transformers_clip() -> State:
    """The same weights under the names of transformers, with a matrix per query, key and value."""
    theirs = {
        "class_embedding": "vision_model.embeddings.class_embedding",
        "positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "proj": "visual_projection.weight",
    }
    parts = {
        "attn.out_proj.": "self_attn.out_proj.",
        "mlp.c_fc.": "mlp.fc1.",
        "mlp.c_proj.": "mlp.fc2.",
        "ln_1.": "layer_norm1.",
        "ln_2.": "layer_norm2.",
    }
    state: State = {"text_model.final_layer_norm.bias": torch.zeros(2)}
    for key, value in openai_clip().items():
        if not key.startswith("visual."):
            continue
        name = key.removeprefix("visual.")
        if name in theirs:
            state[theirs[name]] = value.T.contiguous() if name == "proj" else value
        elif not name.startswith("transformer."):
            name = name.replace("ln_pre", "pre_layrnorm").replace("ln_post", "post_layernorm")
            state[f"vision_model.{name}"] = value
        else:
            _, _, number, rest = name.split(".", 3)
            layer = f"vision_model.encoder.layers.{number}."
            if rest.startswith("attn.in_proj_"):
                kind = rest.removeprefix("attn.in_proj_")
                for letter, part in zip("qkv", value.chunk(3), strict=True):
                    state[f"{layer}self_attn.{letter}_proj.{kind}"] = part.contiguous()
            else:
                old = next(old for old in parts if rest.startswith(old))
                state[layer + rest.replace(old, parts[old])] = value
    return state


@pytest.mark.parametrize("file", [openai_clip, transformers_clip])
@pytest.mark.parametrize("projects", [True, False])
def test_clips_tower_is_timms_conversion_of_it(tmp_path, file, projects):
    options = {} if projects else {"num_classes": 0}
    theirs, ours = (timm.create_model(CLIP, **options) for _ in range(2))
    if projects:
        nn.init.zeros_(ours.head.bias)
    theirs.load_state_dict(checkpoint_filter_fn(dict(openai_clip()), theirs), strict=projects)
    save_file(file(), tmp_path / "w.safetensors")
    load_weights(
        ours, tmp_path / "w.safetensors", CLIP, () if projects else ("head",), ["head.bias"]
    )
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        (
            "resnet18",
            moco_v3,
            ["100 tensors are missing", "'base_encoder.cls_token'", "layout is MoCo-v3"],
        ),
        (VIT, openai_clip, ["missing", "'visual.class_embedding'", "layout is CLIP"]),
        (
            "resnet18",
            lambda: under("net.", resnet()),
            ["'net.conv1.weight'", "layout is torchvision or timm"],
        ),
        (
            "resnet18",
            lambda: {
                "state_dict": {k: v for k, v in moco_v2()["state_dict"].items() if "4.1" not in k}
            },
            ["10 tensors are missing, such as 'layer4.1.bn1.bias'", "layout is MoCo-v2"],
        ),
    ],
)
def test_a_wrong_file_names_the_nearest_layout_and_what_is_missing(tmp_path, name, file, words):
    torch.save(file(), tmp_path / "w.pt")
    size = 224 if name == VIT else 32
    with pytest.raises(UserError) as caught:
        build_network(name, n_classes=5, image_size=size, weights=str(tmp_path / "w.pt"))
    for word in ("w.pt", *words):
        assert word in str(caught.value)


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:FutureWarning")
def test_openais_archives_say_how_to_convert_them(tmp_path):
    path: Path = tmp_path / "ViT-B-16.pt"
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    with pytest.raises(UserError, match=r"ViT-B-16\.pt.*torch\.jit\.load\(FILE\)\.state_dict\(\)"):
        build_network("resnet18", n_classes=5, image_size=32, weights=str(path))

"""Hugging Face Trainer with FAD: a small ResNet learns digits at five angles, not the sixth.

    python examples/hf_trainer.py

The Trainer builds its AdamW from the arguments as usual, and `flatness=` wraps it. The Trainer
still handles accumulation, clipping, the schedule, mixed precision and checkpoints.
"""

import argparse
import os
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is built from a config

import torch
from torch.utils.data import ConcatDataset, Dataset
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    TrainingArguments,
    set_seed,
)

from steppe.domains import Domain, load
from steppe.integrations.transformers import FlatnessTrainer
from steppe.optim import FAD


class Digits(Dataset):
    def __init__(self, domain: Domain) -> None:
        self.domain = domain

    def __len__(self) -> int:
        return len(self.domain)

    def __getitem__(self, index: int) -> dict:
        pixels = torch.from_numpy(self.domain.images[index]).permute(2, 0, 1) / 255
        return {"pixel_values": pixels, "labels": int(self.domain.labels[index])}


def small_resnet() -> ResNetForImageClassification:
    config = ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    model = ResNetForImageClassification(config)
    # A stem that keeps the resolution of 8 x 8 digits, instead of one for 224 x 224 images.
    model.resnet.embedder.embedder.convolution = torch.nn.Conv2d(1, 16, 3, padding=1, bias=False)
    model.resnet.embedder.pooler = torch.nn.Identity()
    # The loss is the mean over a micro-batch; the Trainer divides it by their number.
    model.accepts_loss_kwargs = False
    return model


def accuracy(predictions) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def main(
    epochs: float = 3.0,
    target: str = "75",
    rho: float = 0.05,
    seed: int = 0,
    precision: str = "no",
    out: str = "runs/hf_trainer",
) -> ResNetForImageClassification:
    set_seed(seed)
    domains = {domain.name: Digits(domain) for domain in load("RotatedDigits").domains}
    held_out = domains.pop(target)
    args = TrainingArguments(
        out,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        weight_decay=1e-4,
        max_grad_norm=1.0,  # clips the direction
        lr_scheduler_type="cosine",
        warmup_steps=5,
        fp16=precision == "fp16",  # needs a GPU
        bf16=precision == "bf16",
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = FlatnessTrainer(
        model=small_resnet(),
        args=args,
        train_dataset=ConcatDataset(list(domains.values())),
        eval_dataset=held_out,
        compute_metrics=accuracy,
        flatness=partial(FAD, rho=rho, alpha=0.5, beta=0.5),
    )
    trainer.train()
    print(f"accuracy at {target} degrees: {trainer.evaluate()['eval_accuracy']:.3f}")
    return trainer.model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--target", default="75")
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--out", default="runs/hf_trainer")
    main(**vars(parser.parse_args()))

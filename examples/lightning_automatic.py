"""Lightning's automatic optimization with FAD: only `configure_optimizers` changes.

    python examples/lightning_automatic.py

Lightning runs `training_step` once for each of the four passes. `self.log` only logs the first
pass, and settings that would silently change the FAD step raise an error.
"""

import argparse

import torch
from lightning import pytorch as pl
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from steppe.domains import Domain, load
from steppe.optim import FAD


def tensors(domain: Domain) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.stack([torch.from_numpy(domain.images[i]) for i in range(len(domain))])
    return pixels.permute(0, 3, 1, 2) / 255, torch.from_numpy(domain.labels)


class Digits(pl.LightningModule):
    def __init__(self, rho: float, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(512, 10),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        # max_norm, not Trainer(gradient_clip_val=...), which would clip every pass
        opt = FAD(base, rho=self.hparams.rho, alpha=0.5, beta=0.5, model=self, max_norm=1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.hparams.steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(
    epochs: int = 5, target: str = "75", rho: float = 0.05, seed: int = 0, accelerator: str = "auto"
) -> nn.Module:
    pl.seed_everything(seed, verbose=False)
    domains = {domain.name: tensors(domain) for domain in load("RotatedDigits").domains}
    held_out = TensorDataset(*domains.pop(target))
    train = TensorDataset(*(torch.cat(parts) for parts in zip(*domains.values(), strict=True)))
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True, generator=order)

    module = Digits(rho, steps=epochs * len(loader))
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator=accelerator,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    print(f"training loss {trainer.callback_metrics['train_loss_epoch']:.3f} in the last epoch")
    tested = trainer.test(module, DataLoader(held_out, batch_size=len(held_out)), verbose=False)
    print(f"accuracy at {target} degrees: {tested[0]['accuracy']:.3f}")
    return module.network


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--target", default="75")
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="auto")
    main(**vars(parser.parse_args()))

"""Lightning's manual optimization with FAD: accumulation, fp16, clipping and a schedule.

    python examples/lightning_manual.py

`ManualFlatness` runs the passes: `training_step` calls `flatness_step` and logs the loss.
On a GPU the passes run in fp16 under Lightning's GradScaler, on a CPU in float32.
"""

import argparse

import torch
from lightning import pytorch as pl
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from steppe.domains import Domain, load
from steppe.integrations.lightning import ManualFlatness
from steppe.optim import FAD


def tensors(domain: Domain) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.stack([torch.from_numpy(domain.images[i]) for i in range(len(domain))])
    return pixels.permute(0, 3, 1, 2) / 255, torch.from_numpy(domain.labels)


class Digits(ManualFlatness):
    def __init__(self, rho: float, steps: int, accumulate: int) -> None:
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

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def training_step(self, batch, batch_idx):
        loss = self.flatness_step(batch, self.loss, accumulate=self.hparams.accumulate)
        if loss is not None:  # None while accumulating
            self.log("train_loss", loss, on_epoch=True)

    def on_before_optimizer_step(self, optimizer):  # once per step, .grad holds the direction
        nn.utils.clip_grad_value_(self.parameters(), 0.1)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        opt = FAD(base, rho=self.hparams.rho, alpha=0.5, beta=0.5, model=self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.hparams.steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(
    epochs: int = 5,
    target: str = "75",
    rho: float = 0.05,
    seed: int = 0,
    accumulate: int = 2,
    accelerator: str = "auto",
) -> nn.Module:
    pl.seed_everything(seed, verbose=False)
    domains = {domain.name: tensors(domain) for domain in load("RotatedDigits").domains}
    held_out = TensorDataset(*domains.pop(target))
    train = TensorDataset(*(torch.cat(parts) for parts in zip(*domains.values(), strict=True)))
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True, generator=order)

    module = Digits(rho, steps=epochs * -(-len(loader) // accumulate), accumulate=accumulate)
    fp16 = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator=accelerator,
        devices=1,
        precision="16-mixed" if fp16 else "32-true",
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
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    main(**vars(parser.parse_args()))

"""Accelerate with FAD: accumulation, clipping, a schedule and mixed precision in one loop.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu

Two lines differ from an ordinary Accelerate loop: `FlatnessPasses(...)`, and `passes.over(...)`
around forward and backward.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from steppe.domains import Domain, load
from steppe.integrations.accelerate import FlatnessPasses
from steppe.optim import FAD


def tensors(domain: Domain) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.stack([torch.from_numpy(domain.images[i]) for i in range(len(domain))])
    return pixels.permute(0, 3, 1, 2) / 255, torch.from_numpy(domain.labels)


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
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


def main(
    epochs: int = 5,
    target: str = "75",
    rho: float = 0.05,
    seed: int = 0,
    precision: str = "no",
    cpu: bool = False,
) -> nn.Module:
    set_seed(seed)
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, gradient_accumulation_steps=2)
    domains = {domain.name: tensors(domain) for domain in load("RotatedDigits").domains}
    held_out = domains.pop(target)
    x, y = (torch.cat(parts) for parts in zip(*domains.values(), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)

    model = small_cnn()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    opt = FAD(base, rho=rho, alpha=0.5, beta=0.5)
    steps = epochs * -(-len(loader) // 2)  # an epoch's last step may have one micro-batch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, opt, loader, scheduler)
    passes = FlatnessPasses(accelerator, model, optimizer)

    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in loader:
            with accelerator.accumulate(model):
                for phase, (images, labels) in passes.over(batch):  # nothing while accumulating
                    loss = F.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    if phase.index == 0:  # later phases are at perturbed weights
                        total += loss.item() / len(loader)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
        accelerator.print(f"epoch {epoch}: training loss {total:.3f}")

    model.eval()
    with torch.no_grad():
        images, labels = (part.to(accelerator.device) for part in held_out)
        right = (model(images).argmax(1) == labels).float().mean().item()
    accelerator.print(f"accuracy at {target} degrees: {right:.3f}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--target", default="75")
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    main(**vars(parser.parse_args()))

"""Plain PyTorch with FAD: mixed precision, clipping, accumulation and a schedule in one loop.

    python examples/plain_pytorch.py

On a GPU the passes run in fp16 under a GradScaler, on a CPU in float32. A small network learns
digits at five angles and is tested at the sixth.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from steppe.domains import Domain, load
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
    micro_batches: int = 2,
    device: str | None = None,
) -> nn.Module:
    torch.manual_seed(seed)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    domains = {domain.name: tensors(domain) for domain in load("RotatedDigits").domains}
    held_out = domains.pop(target)
    x, y = (torch.cat(parts) for parts in zip(*domains.values(), strict=True))
    order = torch.Generator().manual_seed(seed)
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True, generator=order)

    model = small_cnn().to(device)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    # max_norm clips the direction; model= updates batch-norm statistics in the first pass only.
    opt = FAD(base, rho=rho, alpha=0.5, beta=0.5, model=model, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs * len(loader))
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

    for epoch in range(epochs):
        model.train()
        total = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            parts = list(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))

            def closure(parts=parts) -> torch.Tensor:
                mean = torch.zeros((), device=device)
                for images, labels in parts:
                    with torch.autocast(device, torch.float16, enabled=scaler.is_enabled()):
                        loss = F.cross_entropy(model(images), labels) / len(parts)
                    scaler.scale(loss).backward()
                    mean += loss.detach()
                return mean

            loss = opt.step(closure, scaler=scaler)  # at the unperturbed weights
            scaler.update()
            scheduler.step()
            total += loss.item() / len(loader)
        print(f"epoch {epoch}: training loss {total:.3f}")

    model.eval()
    with torch.no_grad():
        images, labels = (part.to(device) for part in held_out)
        right = (model(images).argmax(1) == labels).float().mean().item()
    print(f"accuracy at {target} degrees: {right:.3f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--target", default="75")
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))

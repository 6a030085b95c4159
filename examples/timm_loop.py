"""timm's training loop with FAD: its models, parameter groups, schedule, clipping and EMA.

    python examples/timm_loop.py

timm's `NativeScaler` runs a single backward pass and then steps. This loop runs all passes of a FAD
step first, and then does what `NativeScaler` does after its backward.
"""

import argparse

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from steppe.domains import Domain, load
from steppe.optim import FAD


def tensors(domain: Domain, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.stack([torch.from_numpy(domain.images[i]) for i in range(len(domain))])
    images = F.interpolate(pixels.permute(0, 3, 1, 2) / 255, size=size, mode="bilinear")
    return images, torch.from_numpy(domain.labels)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def main(
    epochs: int = 4,
    target: str = "75",
    rho: float = 0.05,
    seed: int = 0,
    model_name: str = "test_efficientnet",
    size: int = 32,
    device: str | None = None,
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    domains = {domain.name: tensors(domain, size) for domain in load("RotatedDigits").domains}
    held_out = [part.to(device) for part in domains.pop(target)]
    x, y = (torch.cat(parts) for parts in zip(*domains.values(), strict=True))
    order = torch.Generator().manual_seed(seed)
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True, generator=order)

    model = timm.create_model(model_name, num_classes=10, in_chans=1, drop_rate=0.1).to(device)
    base = create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=1e-4)  # biases do not decay
    opt = FAD(base, rho=rho, alpha=0.5, beta=0.5, model=model)
    scheduler, epochs = create_scheduler_v2(
        opt, num_epochs=epochs, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=len(loader)
    )
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    ema = ModelEmaV3(model, decay=0.95, use_warmup=True)

    updates = 0
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            for phase in opt.phases(scaler):  # clears gradients itself: no opt.zero_grad()
                with phase:
                    with torch.autocast(device, torch.float16, enabled=scaler.is_enabled()):
                        loss = F.cross_entropy(model(images), labels)
                    scaler.scale(loss).backward()
                    if phase.index == 0:  # later phases are at perturbed weights
                        total += loss.item() / len(loader)
            scaler.unscale_(opt)  # from here on .grad holds the direction
            dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
            scaler.step(opt)
            scaler.update()
            updates += 1
            ema.update(model, step=updates)
            scheduler.step_update(num_updates=updates)
        scheduler.step(epoch + 1)
        print(f"epoch {epoch}: training loss {total:.3f}")

    print(f"accuracy at {target} degrees: {accuracy(model, *held_out):.3f}")
    print(f"accuracy at {target} degrees, averaged weights: {accuracy(ema.module, *held_out):.3f}")
    return model, ema.module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--target", default="75")
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-name", default="test_efficientnet")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))

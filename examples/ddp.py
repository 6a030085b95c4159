"""DistributedDataParallel with FAD, one process per device.

    torchrun --nproc-per-node 2 examples/ddp.py

Each process trains on its shard of every batch, and all end with the same weights. With
``--perturbation local``, each process perturbs along its own gradient, and gradients are reduced
once per step instead of four times. Without torchrun, the script runs in one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from steppe.domains import Domain, load
from steppe.optim import FAD


def tensors(domain: Domain) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.stack([torch.from_numpy(domain.images[i]) for i in range(len(domain))])
    return pixels.permute(0, 3, 1, 2) / 255, torch.from_numpy(domain.labels)


def small_cnn() -> nn.Sequential:
    # Group norm, because batch-norm statistics would differ between processes.
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def train(
    rank: int,
    processes: int,
    device: torch.device,
    epochs: int,
    target: str,
    rho: float,
    seed: int,
    perturbation: str,
) -> nn.Module:
    torch.manual_seed(seed)
    domains = {domain.name: tensors(domain) for domain in load("RotatedDigits").domains}
    held_out = domains.pop(target)
    x, y = (torch.cat(parts) for parts in zip(*domains.values(), strict=True))
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, processes, rank, seed=seed, drop_last=True)
    loader = DataLoader(data, batch_size=64 // processes, sampler=sampler, drop_last=True)

    cuda = device.type == "cuda"
    model = small_cnn().to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    base = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    opt = FAD(base, rho=rho, alpha=0.5, beta=0.5, model=ddp, perturbation=perturbation)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)

            def closure(images=images, labels=labels) -> torch.Tensor:
                loss = F.cross_entropy(ddp(images), labels)  # ddp, not model: it reduces gradients
                loss.backward()
                return loss

            loss = opt.step(closure)
        if rank == 0:
            print(f"epoch {epoch}: loss of the last batch on rank 0 {loss.item():.3f}")

    if rank == 0:
        with torch.no_grad():
            images, labels = (part.to(device) for part in held_out)
            right = (model(images).argmax(1) == labels).float().mean().item()
        print(f"accuracy at {target} degrees: {right:.3f}")
    return model


def main(
    epochs: int = 5,
    target: str = "75",
    rho: float = 0.05,
    seed: int = 0,
    perturbation: str = "global",
    cpu: bool = False,
) -> nn.Module:
    os.environ.setdefault("MASTER_ADDR", "localhost")  # torchrun sets all four
    os.environ.setdefault("MASTER_PORT", "0")
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available() and not cpu
    place = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", place) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=processes)
    try:
        return train(rank, processes, device, epochs, target, rho, seed, perturbation)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--target", default="75")
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--perturbation", choices=["global", "local"], default="global")
    parser.add_argument("--cpu", action="store_true")
    main(**vars(parser.parse_args()))

"""Normalization per domain, between batch and instance normalization."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steppe.errors import UserError

from .network import Domains


class DomainNorm(nn.BatchNorm2d):
    """Normalization per domain that replaces a batch norm and starts with its values.

    If the batch norm includes an activation, as timm's `BatchNormAct2d` does, so does this.

    A `BatchNorm2d`, so that averaging, optimizers and processes treat its statistics as they treat
    those of others; but its forward leaves them alone and puts new ones into `found`.

    Args:
        norm: the batch norm.
        n_domains: the number of source domains.
        domains: says which domains the images of a pass come from.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm2d, n_domains: int, domains: Domains) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        for name in ("weight", "bias", "running_mean", "running_var"):
            start = getattr(norm, name)
            rows = (getattr(self, name) if start is None else start).detach().repeat(n_domains, 1)
            setattr(self, name, nn.Parameter(rows) if name in ("weight", "bias") else rows)
        self.mix = nn.Parameter(self.weight.new_zeros(n_domains))  # a share of 1/2
        parts = (getattr(norm, name, None) for name in ("drop", "act"))  # timm's BatchNormAct2d
        self.after = nn.Sequential(*(part for part in parts if part is not None))
        self.domains = domains
        self.found: dict[str, Tensor] = {}

    def forward(self, input: Tensor) -> Tensor:
        """Normalize images of the domains in `domains`."""
        sizes, only = self.domains.sizes, self.domains.only
        if only is not None:
            rows, sizes = slice(only, only + 1), (input.shape[0],)  # len fixes an export's batch
        elif sizes is not None:
            rows = slice(len(sizes))  # a list of indices would make the host wait for a GPU
        else:
            raise UserError(
                "algorithm 'DSON' normalizes by domain: call predict or predict_source, or the "
                "network inside of_domains"
            )
        x = input.to(self.weight.dtype)  # in half precision, sums would be inexact
        var, mean = torch.var_mean(x, (2, 3), correction=0)
        if self.training:
            moments = [
                (m.mean(0), v.mean(0) + m.var(0, correction=0))
                for m, v in zip(mean.split(sizes), var.split(sizes), strict=True)
            ]
            batch_mean, batch_var = (torch.stack(values) for values in zip(*moments, strict=True))
            if only is None:
                pixels = input.shape[2:].numel()
                self._remember(batch_mean.detach(), batch_var.detach(), [n * pixels for n in sizes])
        else:
            batch_mean, batch_var = self.running_mean[rows], self.running_var[rows]

        def each(values: Tensor) -> Tensor:
            """One row per image."""
            own = zip(values, sizes, strict=True)
            return torch.cat([row.expand(n, *row.shape) for row, n in own])

        share = each(self.mix.sigmoid()[rows])[:, None]
        mean = share * each(batch_mean) + (1 - share) * mean
        var = share * each(batch_var) + (1 - share) * var
        scale = each(self.weight[rows]) * (var + self.eps).rsqrt()
        shift = each(self.bias[rows]) - mean * scale
        # One pass over the maps.
        x = torch.addcmul(shift[:, :, None, None], x, scale[:, :, None, None])
        normalized: Tensor = self.after(x.to(input.dtype))
        return normalized

    def _remember(self, mean: Tensor, var: Tensor, counts: Sequence[int]) -> None:
        unbiased = [v * (n / max(n - 1, 1)) for v, n in zip(var, counts, strict=True)]
        seen = self.num_batches_tracked + 1
        weight = 1 / seen if self.momentum is None else self.momentum
        self.found = {
            "running_mean": torch.lerp(self.running_mean, mean, weight),
            "running_var": torch.lerp(self.running_var, torch.stack(unbiased), weight),
            "num_batches_tracked": seen,
        }

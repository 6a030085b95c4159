"""A perceptron whose dropout is drawn beforehand."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from .network import draw_mask


class MLP(nn.Module):
    """Linear layers with ReLUs between them, `depth` of them, as DomainBed's.

    Hidden units are dropped by masks from `draw_masks`.
    """

    def __init__(
        self, n_inputs: int, n_outputs: int, width: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        sizes = [n_inputs, *[width] * (depth - 1), n_outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.width, self.dropout = width, dropout

    def draw_masks(self, images: Tensor) -> tuple[Tensor, ...]:
        """Draws the mask of each hidden layer, a row for each image; none without dropout."""
        hidden = len(self.layers) - 1 if self.dropout and self.training else 0
        return tuple(draw_mask(images, self.width, self.dropout) for _ in range(hidden))

    def forward(self, x: Tensor, masks: Sequence[Tensor] = ()) -> Tensor:
        for number, layer in enumerate(self.layers[:-1]):
            x = layer(x)
            x = (x * masks[number] if masks else x).relu()
        outputs: Tensor = self.layers[-1](x)
        return outputs

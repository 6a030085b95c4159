"""A classifier with hidden layers."""

from torch import Tensor, nn


class Classifier(nn.Linear):
    """DomainBed's nonlinear classifier: two hidden layers before a linear one."""

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__(n_inputs // 4, n_outputs)
        first, second = nn.Linear(n_inputs, n_inputs // 2), nn.Linear(n_inputs // 2, n_inputs // 4)
        self.hidden = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.hidden(x))

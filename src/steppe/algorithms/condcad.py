"""CondCAD: features that do not reveal the domain of an image whose class is known."""

from torch import Tensor

from .cad import CAD
from .registry import register_algorithm


@register_algorithm(
    "CondCAD",
    idea="contrastive penalty on features that reveal the domain within a class",
    processes="each process compares its own images",
    citation="Ruan et al., Optimal Representations for Covariate Shift, ICLR 2022",
    cost=1.03,
    min_domains=2,
)
class CondCAD(CAD):
    r"""Conditional contrastive adversarial domain bottleneck (Ruan et al., ICLR 2022).

    CAD within classes: for features \(z_i\) of all images of a step, let

    \[ p_{ij} = \frac{\exp(z_i^\top z_j / T)}
        {\sum_{k \ne i : y_k = y_i} \exp(z_i^\top z_k / T)}. \]

    With \(d_i\) the domain of image \(i\) and \(\lambda\) the option `penalty`, CondCAD minimizes

    \[ \overline{\ell(f(x), y)} - \lambda \, \frac{T}{0.07} \;
        \overline{\log \sum_{j : y_j = y_i, \, d_j \ne d_i} p_{ij}}, \]

    where the second mean is over images that have another of their class in another domain; it is
    0 if there are none.

    Matches DomainBed, without the variants that CAD leaves out.

    Args:
        penalty: weight of the bottleneck.
        temperature: \(T\), which divides similarities.
    """

    def comparable(self, labels: Tensor) -> Tensor:
        return labels[:, None] == labels

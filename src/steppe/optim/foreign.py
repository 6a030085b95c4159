"""Optimizers that come from torch or another package."""

from steppe.search import ADAM_LR, ADAM_LR_FROM_SCRATCH, DECOUPLED_DECAY

from .registry import SGD, OptimizerSpec

FOREIGN = (
    OptimizerSpec(
        name="adam",
        target="torch.optim:Adam",
        citation="Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015",
        summary="Steps scaled by moments of the gradient, weight by weight.",
        passes=1,
        lr=ADAM_LR,
        scratch_lr=ADAM_LR_FROM_SCRATCH,
        base=None,
    ),
    OptimizerSpec(
        name="adamw",
        target="torch.optim:AdamW",
        citation="Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019",
        summary="Adam with weight decay beside its scaling, not within.",
        passes=1,
        lr=ADAM_LR,
        scratch_lr=ADAM_LR_FROM_SCRATCH,
        weight_decay=DECOUPLED_DECAY,
        base=None,
    ),
    OptimizerSpec(
        name="sgd",
        target=SGD,
        citation="Nesterov, A method for solving the convex programming problem, 1983",
        summary="Gradient descent with momentum.",
        passes=1,
        base=None,
    ),
    # Agrees with Algorithm 2 of the paper with these options. `eps` stays the caller's: 1e-16 by
    # default.
    OptimizerSpec(
        name="adabelief",
        target="pytorch_optimizer:AdaBelief",
        citation="Zhuang et al., AdaBelief Optimizer, NeurIPS 2020",
        summary="Adam with steps scaled by how far the gradient is from its mean.",
        passes=1,
        lr=ADAM_LR,
        scratch_lr=ADAM_LR_FROM_SCRATCH,
        weight_decay=DECOUPLED_DECAY,
        base=None,
        fixed={
            "weight_decouple": True,
            "fixed_decay": False,
            "rectify": False,
            "n_sma_threshold": 5,
            "degenerated_to_sgd": True,
            "ams_bound": False,
        },
        extra="dg",
    ),
)

"""DomainBed's protocol, as in its published tables."""

from .protocol import OWN, Protocol, Rule

PROTOCOL = Protocol(
    name="domainbed",
    about="leave-one-domain-out, 20 samples on each of 3 splits, ImageNet weights",
    citation="Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021",
    code="https://github.com/facebookresearch/DomainBed",
    rules={
        "targets": Rule(
            "single",
            "sweep.py --single_test_envs; without it also pairs, for leave-one-out selection",
            others=("pairs",),
        ),
        "trials": Rule(3, "sweep.py: --n_trials"),
        "split": Rule("domainbed", "train.py: --holdout_fraction 0.2"),
        "draws": Rule(20, "sweep.py: --n_hparams"),
        "space": Rule("domainbed", "hparams_registry.py"),
        "selection": Rule("train-val", "model_selection.py", others=("leave-one-out", "oracle")),
        "weights": Rule(OWN, "the published tables; newer code defaults to AugMix weights"),
        "backbone": Rule(OWN, "networks.py: ResNet-50 for photographs"),
        "freeze_bn": Rule(OWN, "the published tables; newer code defaults to false"),
        "image_size": Rule(OWN, "datasets.py"),
        "augment": Rule(OWN, "datasets.py"),
        "augment_validation": Rule(
            False, "SWAD; DomainBed's own code augments validation images", others=(True,)
        ),
        "steps": Rule(
            OWN,
            "datasets.py: 5,001; 15,001 for DomainNet as in SWAD",
            others=(5001,),
        ),
        "checkpoint_every": Rule(OWN, "datasets.py: CHECKPOINT_FREQ"),
    },
)

"""The later protocol of FAD's authors, against leaks of test data: DomainBed-v2.

Its splits are numbered 1 to 3 and seeded differently, so runs here have other images in training
and validation. The ranges of algorithms' options are those that they declare, which are
DomainBed's; DomainBed-v2 has the same except for IRM, whose weight it draws from 1e-5 to 1e-1.
"""

from .protocol import FILE, OWN, Protocol, Rule

_PAIRS = "the README, and generate_scripts.py"
_REPEATED = "the README, under 'Repeated experiments'"
_DATASETS = "datasets.py"

PROTOCOL = Protocol(
    name="yu2024",
    about="self-supervised or no pretraining, target pairs, one search whose winner is rerun",
    citation="Yu et al., Rethinking the Evaluation Protocol of Domain Generalization, CVPR 2024",
    code="https://github.com/h-yu16/DomainBed-v2",
    rules={
        "targets": Rule(
            "single",
            _PAIRS,
            datasets={
                "DomainNet": "clipart+infograph,painting+quickdraw,real+sketch",
                "NICO++": "autumn+rock,dim+grass,outdoor+water",
            },
        ),
        "trials": Rule(1, _REPEATED),
        "draws": Rule(10, _REPEATED),
        "default_draw": Rule(False, "generate_scripts.py: samples 1 to 10"),
        "reruns": Rule(2, _REPEATED),
        "split": Rule("domainbed", "train.py: --holdout_fraction 0.2"),
        "space": Rule("yu2024", "pretrain.json"),
        "selection": Rule(
            "pooled-val", "train.py: val_accs['overall']; accuracy over all images of the targets"
        ),
        "weights": Rule(
            None,
            "the README: MoCo-v2 for ResNet-50, MoCo-v3 for ViT-B/16; the paper also has none",
            others=("none", FILE),
        ),
        "backbone": Rule(OWN, "the README", others=("resnet50", "vit_base_patch16_224")),
        "freeze_bn": Rule(OWN, "networks.py: frozen if pretrained"),
        "image_size": Rule(OWN, _DATASETS),
        "augment": Rule(OWN, _DATASETS),
        "augment_validation": Rule(False, _DATASETS),
        "steps": Rule(
            5000,
            f"{_DATASETS}: train_steps_dict",
            datasets={"DomainNet": 15000, "NICO++": 10000},
        ),
        "checkpoint_every": Rule(
            300,
            f"{_DATASETS}: checkpoint_step_dict",
            datasets={"DomainNet": 1000, "NICO++": 600},
        ),
    },
    note="The optimizer there is Adam; others run in its range of learning rates.",
)

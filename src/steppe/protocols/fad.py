"""The protocol of the FAD paper: DomainBed's, with a space that has momentum, and NICO++."""

from .protocol import OWN, Protocol, Rule

_EXPERIMENTS = "Section 4, which follows DomainBed"

PROTOCOL = Protocol(
    name="fad",
    about="DomainBed's protocol with the FAD paper's search space and lengths, and NICO++ in pairs",
    citation="Zhang et al., Flatness-Aware Minimization for Domain Generalization, ICCV 2023",
    rules={
        "targets": Rule("single", "Appendix B: each domain in turn, NICO++ in three pairs"),
        "trials": Rule(3, _EXPERIMENTS),
        "split": Rule(
            "domainbed",
            "Section 4: 20% for validation; appendix: the official split of PACS, 30% of VLCS",
            others=("appendix",),
        ),
        "draws": Rule(20, "Section 4: 20 trials of search"),
        "space": Rule("fad", "Appendix B, table of search spaces"),
        "selection": Rule("train-val", "Section 4: validation with training data"),
        "weights": Rule(OWN, "Section 4: ImageNet"),
        "backbone": Rule(OWN, "Section 4: ResNet-50"),
        "freeze_bn": Rule(OWN, _EXPERIMENTS),
        "image_size": Rule(OWN, _EXPERIMENTS),
        "augment": Rule(OWN, _EXPERIMENTS),
        "steps": Rule(OWN, "Section 4: 5,000, NICO++ 10,000, DomainNet 15,000; plus DomainBed's 1"),
        "checkpoint_every": Rule(OWN, _EXPERIMENTS),
    },
)

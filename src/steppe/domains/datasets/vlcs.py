"""VLCS: five classes of photos from four collections."""

from steppe.domains.folder import reader
from steppe.domains.spec import DatasetSpec, Source, google_drive, same_file

_DOMAINS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")

VLCS = DatasetSpec(
    name="VLCS",
    domains=_DOMAINS,
    labels=("C", "L", "S", "V"),
    n_classes=5,
    citation="Fang et al., Unbiased Metric Learning, ICCV 2013",
    read=reader("VLCS", _DOMAINS),
    folder="VLCS",
    counts=(1415, 2656, 3282, 3376),
    validate_every=50,
    validation_tolerance=0.2,
    appendix_holdout=0.3,
    source=Source(
        downloads=(
            same_file(
                "VLCS.tar.gz",
                "md5:8870171eba660927d9668f4e515928e4",
                google_drive("1skwblH1_okBwxWxmRsp9_qi15hyPpxg8"),
            ),
        ),
        elsewhere=(
            "https://www.mediafire.com/file/7yv132lgn1v267r/vlcs.tar.gz/file (smaller images; use "
            "its parts full and test; the domains are CALTECH, LABELME, SUN, PASCAL, the classes 0 "
            "to 4 are bird, car, chair, dog, person)",
            "https://github.com/facebookresearch/DomainBed (domainbed/misc/vlcs_files.txt lists "
            "the original images)",
        ),
    ),
)

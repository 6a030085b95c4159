"""OfficeHome: 65 classes of everyday objects as art, clip art, product pictures and photos."""

from steppe.domains.folder import reader
from steppe.domains.spec import DatasetSpec, Source, google_drive, same_file

_DOMAINS = ("Art", "Clipart", "Product", "Real World")

OFFICE_HOME = DatasetSpec(
    name="OfficeHome",
    domains=_DOMAINS,
    labels=("A", "C", "P", "R"),
    n_classes=65,
    citation="Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, "
    "CVPR 2017",
    read=reader("OfficeHome", _DOMAINS),
    folder="office_home",
    counts=(2427, 4365, 4439, 4357),
    source=Source(
        downloads=(
            same_file(
                "OfficeHomeDataset_10072016.zip",
                "md5:b1c14819770c4448fd5b6d931031c91c",
                google_drive("1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC"),
                google_drive("0B81rNlvomiwed0V1YUxQdC1uOTg", "0-2SNWq0CDAuWOBRRBL7ZZsw"),
            ),
        ),
        elsewhere=(
            "https://www.hemanthdv.org/officeHomeDataset.html (the authors' page)",
            "https://huggingface.co/datasets/flwrlabs/office-home (parquet: export the images)",
        ),
    ),
)

"""PACS: seven classes as art paintings, cartoons, photos and sketches."""

from steppe.domains.folder import reader
from steppe.domains.spec import DatasetSpec, Download, Mirror, Source, google_drive

_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
# The same 9,991 images, repackaged in a folder PACS.
_REPACKAGED = (
    "https://huggingface.co/datasets/Azeez577/PACS/resolve/"
    "fb1ee820df83b4e9957251d9f6973eb6d424c494/PACS.zip"
)

PACS = DatasetSpec(
    name="PACS",
    domains=_DOMAINS,
    labels=("A", "C", "P", "S"),
    n_classes=7,
    citation="Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
    read=reader("PACS", _DOMAINS),
    folder="PACS",
    counts=(2048, 2344, 1670, 3929),
    official_lists="{domain}_{part}_kfold.txt",
    source=Source(
        downloads=(
            Download(
                "PACS.zip",
                (
                    # DomainBed's archive, in a folder kfold.
                    Mirror(google_drive("1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd")),
                    Mirror(
                        _REPACKAGED,
                        "sha256:42bf567f1ed8a01d522e47e4a677e2a3149577bbd6fcbb38bedfdd73cb59e147",
                    ),
                ),
            ),
        ),
        elsewhere=(
            "https://domaingeneralization.github.io (the authors' page)",
            "https://huggingface.co/datasets/flwrlabs/pacs (parquet: export the images)",
            "https://www.kaggle.com/datasets/nickfratto/pacs-dataset",
        ),
    ),
)

"""DomainNet: 345 classes in six styles, without duplicate images, as in DomainBed."""

from steppe.domains.folder import reader
from steppe.domains.spec import DatasetSpec, Download, Mirror, Source, same_file

_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_DUPLICATES = "domain_net_duplicates.txt"
"""DomainBed's list of 9,431 duplicate images, one ``domain/class/image`` per line."""
_LIST = f"https://raw.githubusercontent.com/facebookresearch/DomainBed/main/domainbed/misc/{_DUPLICATES}"

_BU = "http://csr.bu.edu/ftp/visda/2019/multi-source/"
_CLEANED = f"{_BU}groundtruth/"
"""The cleaned versions of clipart and painting."""
_COPY = "https://huggingface.co/yashkant/evalmerge/resolve/main/domainnet/"

DOMAIN_NET = DatasetSpec(
    name="DomainNet",
    domains=_DOMAINS,
    labels=("clip", "info", "paint", "quick", "real", "sketch"),
    n_classes=345,
    citation="Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019",
    read=reader("DomainNet", _DOMAINS, left_out=_DUPLICATES),
    folder="domain_net",
    counts=(48129, 51605, 72266, 172500, 172947, 69128),
    steps=15001,
    checkpoint_every=1000,
    validate_every=500,
    batch_exponents=(3, 5),
    left_out=_DUPLICATES,
    source=Source(
        downloads=(
            # First, because it is small and DomainBed's counts exclude the images it lists.
            Download(_DUPLICATES, (Mirror(_LIST),), limit=10**9),
            same_file("clipart.zip", "md5:cd0d8f2d77a4e181449b78ed62bccf1e", _CLEANED, _COPY),
            same_file("infograph.zip", "md5:720380b86f9e6ab4805bb38b6bd135f8", _BU, _COPY),
            same_file("painting.zip", "md5:1ae32cdb4f98fe7ab5eb0a351768abfd", _CLEANED, _COPY),
            same_file("quickdraw.zip", "md5:bdc1b6f09f277da1a263389efe0c7a66", _BU, _COPY),
            same_file("real.zip", "md5:dcc47055e8935767784b7162e7c7cca6", _BU, _COPY),
            same_file("sketch.zip", "md5:658d8009644040ff7ce30bb2e820850f", _BU, _COPY),
        ),
        elsewhere=(
            "https://ai.bu.edu/M3SDA (the authors' page: download the cleaned version)",
            "https://huggingface.co/datasets/wltjr1007/DomainNet (parquet: export the images)",
        ),
    ),
)

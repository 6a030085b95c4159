"""Folders `root/domain/class/image`, listed in the order that DomainBed lists them."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from steppe.domains import Domain, dataset_spec, load
from steppe.domains.folder import read_folder
from steppe.errors import UserError


def write(root: Path, names: Iterable[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".txt":
            path.write_text("not an image")
        else:
            Image.new("RGB", (4, 3)).save(path, "PNG")


def names(domain: Domain) -> list[str]:
    return [domain.images.name(i) for i in range(len(domain))]


# Capitals sort before small letters, 10 before 9, deeper folders after their parents' files, and
# more-2 between more and more/sub.
TREE = (
    "photo/dog/9.jpg",
    "photo/dog/10.jpg",
    "photo/dog/B.PNG",
    "photo/dog/a.jpeg",
    "photo/dog/notes.txt",
    "photo/dog/more/1.jpg",
    "photo/dog/more/sub/1.jpg",
    "photo/dog/more-2/1.jpg",
    "photo/dog/a more/1.tiff",
    "photo/Cat/x y.webp",
    "photo/Cat/ü.bmp",
    "photo/house/1.pgm",
    "art/dog/1.ppm",
    "art/Cat/1.tif",
    "art/house/1.jpg",
)


def test_the_order_is_that_of_torchvisions_image_folder(tmp_path: Path):
    write(tmp_path, TREE)
    classes, domains = read_folder(tmp_path, ["art", "photo"])
    assert [domain.name for domain in domains] == ["art", "photo"]
    assert sum(map(len, domains)) == len(TREE) - 1
    for domain in domains:
        reference = ImageFolder(str(tmp_path / domain.name))
        assert list(classes) == reference.classes
        expected = [
            (Path(path).relative_to(tmp_path / domain.name).as_posix(), label)
            for path, label in reference.samples
        ]
        assert list(zip(names(domain), domain.labels.tolist(), strict=True)) == expected
        assert domain.images[0].shape == (3, 4, 3)


def test_a_domain_without_a_class_keeps_the_numbers_of_the_others(tmp_path: Path):
    write(tmp_path, ["a/cat/1.jpg", "a/dog/1.jpg", "b/dog/1.jpg", "b/horse/1.jpg"])
    classes, (a, b) = read_folder(tmp_path, ["a", "b"])
    assert classes == ("cat", "dog", "horse")
    assert a.labels.tolist() == [0, 1]
    assert b.labels.tolist() == [1, 2]


def test_a_missing_domain_is_named_with_what_is_there(tmp_path: Path):
    write(tmp_path, ["art/dog/1.jpg", "photo/dog/1.jpg", ".cache/dog/1.jpg"])
    with pytest.raises(UserError, match="expected folders art_painting, photo; found art, photo"):
        read_folder(tmp_path, ["art_painting", "photo"])
    with pytest.raises(UserError, match="found none"):
        read_folder(tmp_path / "nowhere", ["art"])


def test_a_domain_without_images_is_named(tmp_path: Path):
    write(tmp_path, ["art/dog/1.jpg", "photo/1.jpg", "photo/dog/notes.txt"])
    with pytest.raises(UserError, match="domain 'photo' has no images"):
        read_folder(tmp_path, ["art", "photo"])


def test_domainnets_duplicates_are_left_out_where_the_list_is_there(tmp_path: Path):
    spec = dataset_spec("DomainNet")
    root = tmp_path / "domain_net"
    classes = [f"class {i:03}" for i in range(345)]
    for domain in spec.domains:
        for name in classes:
            (root / domain / name).mkdir(parents=True)
        write(root / domain, [f"{classes[0]}/{k}.jpg" for k in range(3)])
    assert [len(domain) for domain in load("DomainNet", tmp_path).domains] == [3] * 6

    (root / "domain_net_duplicates.txt").write_text(
        f"clipart/{classes[0]}/1.jpg\nreal/{classes[0]}/2.jpg\n"
    )
    domains = {domain.name: domain for domain in load("DomainNet", tmp_path).domains}
    assert names(domains["clipart"]) == [f"{classes[0]}/0.jpg", f"{classes[0]}/2.jpg"]
    assert names(domains["real"]) == [f"{classes[0]}/0.jpg", f"{classes[0]}/1.jpg"]
    assert len(domains["sketch"]) == 3


@pytest.mark.parametrize("odd", [b"\xff\xfed", b"ink/\xff\xfed"], ids=["domain", "class"])
def test_a_folder_whose_name_is_not_text_is_refused(tmp_path: Path, odd: bytes):
    write(tmp_path, ["ink/dog/1.jpg", "oil/dog/1.jpg"])
    os.makedirs(os.fsencode(tmp_path) + b"/" + odd + b"/dog")
    with pytest.raises(UserError) as error:
        load(tmp_path)
    shown = odd.decode(errors="surrogateescape").encode("ascii", "backslashreplace").decode()
    assert str(error.value) == (f"the name of folder {tmp_path}/{shown} is not UTF-8: rename it")


def test_an_image_whose_name_is_not_text_is_read(tmp_path: Path):
    write(tmp_path, ["ink/dog/1.jpg", "oil/dog/1.jpg"])
    os.rename(tmp_path / "ink/dog/1.jpg", os.fsencode(tmp_path) + b"/ink/dog/\xff.jpg")
    dataset = load(tmp_path)
    assert dataset.domains[0].images[0].shape == (3, 4, 3)
    assert len(dataset.fingerprint()) == 64


def test_a_list_of_duplicates_that_is_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "domain_net_duplicates.txt")
    with pytest.raises(OSError, match="not a plain file"):
        dataset_spec("DomainNet").read(tmp_path)

"""Archives that try to write elsewhere, and honest ones."""

import gzip
import io
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from steppe.domains import archives
from steppe.domains.archives import UnsafeArchive, find_folder, unpack
from steppe.errors import UserError

IMAGE = b"\xff\xd8 an image"


def make_zip(path: Path, members: dict[str, bytes], mode: int = stat.S_IFREG | 0o644) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, contents)
    return path


def make_tar(path: Path, *members: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                name, contents = member
                info = tarfile.TarInfo(name)
                info.size = len(contents)
                archive.addfile(info, io.BytesIO(contents))
    return path


def entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


OUTSIDE = ["../evil.jpg", "dog/../../evil.jpg", "{tmp}/evil.jpg", "..\\evil.jpg", "C:\\evil.jpg"]
TRICKS = {
    "symlink": [entry("out", tarfile.SYMTYPE, "{tmp}"), ("out/evil.jpg", IMAGE)],
    "relative symlink": [entry("out", tarfile.SYMTYPE, "../.."), ("out/evil.jpg", IMAGE)],
    "symlink to itself": [entry("evil.jpg", tarfile.SYMTYPE, "evil.jpg")],
    "symlink as file": [entry("evil.jpg", tarfile.SYMTYPE, "{tmp}/secret")],
    "hard link": [entry("evil.jpg", tarfile.LNKTYPE, "{tmp}/secret")],
    "hard link then write": [
        entry("link", tarfile.LNKTYPE, "../../secret"),
        ("link", b"overwritten"),
    ],
    "device": [entry("evil.jpg", tarfile.CHRTYPE)],
    "pipe": [entry("evil.jpg", tarfile.FIFOTYPE)],
}


def refuse(archive: Path, folder: Path, home: Path) -> None:
    """Unpacks below home, and sees that only what is below `folder` may have changed."""
    (home / "secret").write_bytes(b"secret")
    before = everything(home)
    with pytest.raises(UnsafeArchive, match=r"not safe to unpack: its member '.*' (leaves|is a)"):
        unpack(archive, folder)
    inside = {str(folder.relative_to(home) / path) for path in everything(folder)}
    assert everything(home) - before <= {"stage", "stage/unpacked"} | inside
    assert (home / "secret").read_bytes() == b"secret"
    assert not any(path.name == "evil.jpg" for path in home.rglob("*"))


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    name = name.format(tmp=tmp_path)
    archive = tmp_path / f"a.{kind}"
    if kind == "zip":
        make_zip(archive, {"dog/1.jpg": IMAGE, name: IMAGE})
    else:
        make_tar(archive, ("dog/1.jpg", IMAGE), (name, IMAGE))
    refuse(archive, tmp_path / "stage" / "unpacked", tmp_path)


@pytest.mark.parametrize("trick", TRICKS)
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, trick: str) -> None:
    for member in TRICKS[trick]:
        if isinstance(member, tarfile.TarInfo):
            member.linkname = member.linkname.format(tmp=tmp_path)
    archive = make_tar(tmp_path / "a.tar.gz", *TRICKS[trick])
    refuse(archive, tmp_path / "stage" / "unpacked", tmp_path)


def test_a_symlink_in_a_zip_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"out": str(tmp_path).encode()}, stat.S_IFLNK | 0o777)
    refuse(archive, tmp_path / "stage" / "unpacked", tmp_path)


def test_honest_archives_are_unpacked_without_what_macos_adds(tmp_path: Path) -> None:
    images = {"./kfold/photo/dog/1.jpg": IMAGE, "kfold/sketch/dog/2.jpg": IMAGE * 2}
    junk = {"__MACOSX/kfold/photo/dog/._1.jpg": b"x", "kfold/photo/dog/._1.jpg": b"x"}
    copies = [
        entry("kfold/photo/dog/3.jpg", tarfile.LNKTYPE, "kfold/sketch/dog/2.jpg"),
        entry("kfold/photo/dog/4.jpg", tarfile.SYMTYPE, "../../sketch/dog/2.jpg"),
    ]
    make_zip(tmp_path / "a.zip", images | junk)
    make_tar(tmp_path / "b.tar", *images.items(), *junk.items(), *copies)
    make_tar(tmp_path / "c.tar.gz", *images.items(), *junk.items(), *copies)
    for name in ("a.zip", "b.tar", "c.tar.gz"):
        folder = tmp_path / name[0]
        unpack(tmp_path / name, folder)
        root = find_folder(folder, ["photo", "sketch"])
        assert root == folder / "kfold"
        files = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        copied = {} if name == "a.zip" else {"3.jpg": IMAGE * 2, "4.jpg": IMAGE * 2}
        assert files == {"1.jpg": IMAGE, "2.jpg": IMAGE * 2} | copied
        assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert find_folder(tmp_path, ["photo", "cartoon"]) is None


def test_single_files(tmp_path: Path) -> None:
    (tmp_path / "train-idx.gz").write_bytes(gzip.compress(IMAGE))
    (tmp_path / "list.txt").write_bytes(b"a\n")
    for name in ("train-idx.gz", "list.txt"):
        unpack(tmp_path / name, tmp_path / "raw")
    assert (tmp_path / "raw" / "train-idx").read_bytes() == IMAGE
    assert (tmp_path / "raw" / "list.txt").read_bytes() == b"a\n"


@pytest.mark.parametrize("name", ["a.zip", "b.tar.gz", "c.gz"])
def test_a_damaged_archive_is_named(tmp_path: Path, name: str) -> None:
    archive = tmp_path / name
    noise = bytes(range(256)) * 400
    if name == "a.zip":
        make_zip(archive, {"dog/1.jpg": noise})
    elif name == "b.tar.gz":
        make_tar(archive, ("dog/1.jpg", noise))
    else:
        archive.write_bytes(gzip.compress(noise))
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"archive {archive} is damaged: .*Delete it and rerun"):
        unpack(archive, tmp_path / "out")
    if name == "a.zip":  # one byte of an image is wrong, and everything else is right
        archive.write_bytes(whole.replace(noise[:100], b"\0" + noise[1:99] + b"!", 1))
        with pytest.raises(UserError, match="is damaged: Bad CRC-32"):
            unpack(archive, tmp_path / "out")


@pytest.mark.parametrize("name", ["a.zip", "b.tar.gz", "c.gz"])
def test_a_bomb_is_refused_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    archive, size = tmp_path / name, 50_000_000
    if name == "a.zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("dog/1.jpg", bytes(size))
    elif name == "b.tar.gz":
        make_tar(archive, ("dog/1.jpg", bytes(size)))
    else:
        archive.write_bytes(gzip.compress(bytes(size)))
    assert archive.stat().st_size < 100_000
    allowed = 4_000_000
    monkeypatch.setattr(archives, "SHARE", allowed / shutil.disk_usage(tmp_path).free)
    with pytest.raises(UserError, match=f"archive {archive} does not fit into the free disk space"):
        unpack(archive, tmp_path / "out")
    written = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert written <= (0 if name == "a.zip" else allowed)  # a zip says what it holds beforehand


def test_an_archive_of_countless_members_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_zip(tmp_path / "a.zip", {f"dog/{i}.jpg": IMAGE for i in range(4)})
    unpack(archive, tmp_path / "four")
    monkeypatch.setattr(archives, "MEMBERS", 3)
    with pytest.raises(UserError, match="has more than 3 members"):
        unpack(archive, tmp_path / "three")


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    info = entry("long", tarfile.GNUTYPE_LONGNAME)
    info.size = 2**33  # what gzip makes of a few megabytes
    with gzip.open(tmp_path / "a.tar.gz", "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000))
    with pytest.raises(UserError, match="damaged: it has a header of 8,589,934,592 bytes"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "out")

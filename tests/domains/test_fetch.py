"""Downloads from a real server on this machine that fails in the ways that servers fail."""

import errno
import gzip
import hashlib
import http.server
import io
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from steppe.console import Console
from steppe.domains import DatasetSpec, dataset_names, dataset_spec
from steppe.domains.datasets import terra_incognita
from steppe.domains.fetch import Patience, Unavailable, download
from steppe.domains.get import get
from steppe.domains.spec import Download, Mirror, Source
from steppe.errors import UserError
from tests.limits import seconds

QUICK = Patience(timeout=seconds(60), attempts=2, pause=0)
ONCE = Patience(timeout=seconds(60), attempts=1, pause=0)


@dataclass
class Page:
    """What the server has at a path, and how it misbehaves."""

    body: bytes = b""
    kind: str = "application/octet-stream"
    etag: str | None = '"one"'
    ranges: bool = True
    heeds_if_range: bool = True
    statuses: list[int] = field(default_factory=list)  # errors before the first answer
    cuts: list[int] = field(default_factory=list)  # bytes of the first answers, then it hangs up
    stall: threading.Event | None = None  # a cut answer hangs instead, until this is set
    drip: float = 0  # seconds before each byte
    slow_headers: bool = False  # drips within the headers already
    claims: str | None = None  # the length it announces
    chunked: bool = False  # announces a length and does not keep to it


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, Page] = {}
        self.asked: list[tuple[str, str | None, str | None]] = []  # path, Range, If-Range

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        wanted, if_range = self.headers["Range"], self.headers["If-Range"]
        self.server.asked.append((path, wanted, if_range))
        page = self.server.pages.get(path)
        if page is None or page.statuses:
            self.send_error(page.statuses.pop(0) if page else 404)
            return
        unchanged = if_range in (None, page.etag) or not page.heeds_if_range
        start = int(wanted[6:-1]) if wanted and page.ranges and unchanged else 0
        if start >= len(page.body) > 0:
            self.send_error(416)
            return
        if page.slow_headers:
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000:
                self.wfile.write(bytes([byte]))
                time.sleep(page.drip)
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", page.claims or str(len(page.body) - start))
        if page.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        if start:
            last = len(page.body) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(page.body)}")
        if page.etag:
            self.send_header("ETag", page.etag)
        self.end_headers()
        body = page.body[start:]
        if page.cuts:
            self.wfile.write(body[: page.cuts.pop(0)])
            self.wfile.flush()
            if page.stall:
                page.stall.wait(seconds(600))
        elif page.drip:
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(page.drip)
        elif page.chunked:
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        else:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def zipped(files: dict[str, bytes], size: int = 0) -> bytes:
    """A zip archive, of at least a size."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, contents in files.items():
            archive.writestr(name, contents)
        archive.comment = b"%d" % size
        archive.writestr("filler", bytes(size))
    return buffer.getvalue()


BODY = zipped({"a.jpg": b"image"}, 300_000)
OTHER = zipped({"b.jpg": b"other"}, 300_000)
LONGER = zipped({"b.jpg": b"other"}, 300_001)
MD5 = f"md5:{hashlib.md5(BODY).hexdigest()}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fetch(item: Download, folder: Path, patience: Patience = QUICK) -> list[str]:
    """Downloads, and returns what was reported."""
    said = io.StringIO()
    download(item, folder, console=Console(file=said), patience=patience)
    return said.getvalue().splitlines()


def one(server: Server, path: str = "a.zip", checksum: str | None = None) -> Download:
    return Download("a.zip", (Mirror(server.url(path), checksum),))


def test_a_cut_download_goes_on_from_its_last_byte(server: Server, tmp_path: Path) -> None:
    server.pages["a.zip"] = Page(BODY, cuts=[100_000, 50_000])
    said = fetch(one(server), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert server.asked == [
        ("a.zip", None, None),
        ("a.zip", "bytes=100000-", '"one"'),
        ("a.zip", "bytes=150000-", '"one"'),
    ]
    # No checksum is published: the file's own is told and noted.
    digest = hashlib.sha256(BODY).hexdigest()
    assert any(digest in line and "no published checksum" in line for line in said)
    assert (tmp_path / "a.zip.sha256").read_text() == f"{digest}  a.zip\n"
    assert names(tmp_path) == {"a.zip", "a.zip.sha256"}


def test_progress_counts_attempts_only_without_it(server: Server, tmp_path: Path) -> None:
    server.pages["a.zip"] = Page(BODY, cuts=[40_000] * 6)  # more than the attempts
    fetch(one(server), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    # A server that cuts at the same byte each time, from the start, is given up.
    server.pages["b.zip"] = Page(BODY, cuts=[40_000] * 99, ranges=False)
    with pytest.raises(Unavailable, match="closed after 40000 of "):
        fetch(Download("b.zip", (Mirror(server.url("b.zip")),)), tmp_path)


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.pages["a.zip"] = Page(BODY, cuts=[100_000], ranges=False)
    fetch(one(server), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert server.asked[1] == ("a.zip", "bytes=100000-", '"one"')


@pytest.mark.parametrize(
    "changed",
    [
        Page(OTHER, etag='"two"'),
        Page(OTHER, etag='"two"', heeds_if_range=False),
        Page(LONGER, etag='"one"'),
    ],
)
def test_a_changed_file_starts_over(server: Server, tmp_path: Path, changed: Page) -> None:
    assert len(OTHER) == len(BODY) < len(LONGER)
    server.pages["a.zip"] = Page(BODY, cuts=[100_000, 0])
    with pytest.raises(Unavailable):
        fetch(one(server), tmp_path, ONCE)
    assert (tmp_path / "a.zip.part").stat().st_size == 100_000
    server.pages["a.zip"] = changed
    fetch(one(server), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == changed.body
    assert len(server.asked) <= 4  # seen at once: no byte of the other file was added


def test_bytes_without_a_validator_are_not_trusted(server: Server, tmp_path: Path) -> None:
    server.pages["a.zip"] = Page(BODY, etag=None, cuts=[100_000])
    fetch(one(server), tmp_path)
    assert [wanted for _, wanted, _ in server.asked] == [None, None]
    server.pages["a.zip"].cuts = [100_000]  # but a checksum is as good
    fetch(one(server, checksum=MD5), tmp_path / "checked")
    assert server.asked[-1] == ("a.zip", "bytes=100000-", None)


def test_wrong_bytes_fall_to_the_second_mirror(server: Server, tmp_path: Path) -> None:
    server.pages |= {"bad/a.zip": Page(OTHER), "good/a.zip": Page(BODY)}
    bad, good = server.url("bad/a.zip"), server.url("good/a.zip")
    said = fetch(Download("a.zip", (Mirror(bad, MD5), Mirror(good, MD5))), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    found = hashlib.md5(OTHER).hexdigest()
    reports = [line for line in said if not line.startswith("a.zip: ")]  # how far it is
    assert reports == [f"{bad}: its md5 is {found}, expected {MD5[4:]}; deleted"]
    assert names(tmp_path) == {"a.zip"}


def test_the_second_mirror_goes_on_where_the_first_died(server: Server, tmp_path: Path) -> None:
    server.pages |= {"1/a.zip": Page(BODY, cuts=[100_000, 0]), "2/a.zip": Page(BODY, etag='"x"')}
    urls = (server.url("1/a.zip"), server.url("2/a.zip"))
    fetch(Download("a.zip", tuple(Mirror(url, MD5) for url in urls)), tmp_path, ONCE)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert server.asked[-1] == ("2/a.zip", "bytes=100000-", None)


def test_a_part_that_was_wrong_is_not_held_against_the_mirror(
    server: Server, tmp_path: Path
) -> None:
    server.pages["a.zip"] = Page(BODY, cuts=[100_000, 0])
    with pytest.raises(Unavailable):
        fetch(one(server, checksum=MD5), tmp_path, ONCE)
    (tmp_path / "a.zip.part").write_bytes(bytes(100_000))
    said = fetch(one(server, checksum=MD5), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert any("after resuming; starting over" in line for line in said)


PAGE = b"<!DOCTYPE html><html><head><title>Google Drive - Quota exceeded</title></head></html>"


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/octet-stream"])
def test_a_web_page_is_no_archive(server: Server, tmp_path: Path, kind: str) -> None:
    server.pages["a.zip"] = Page(BODY, cuts=[100_000, 0])
    with pytest.raises(Unavailable):
        fetch(one(server), tmp_path, ONCE)
    before = (tmp_path / "a.zip.part").read_bytes()
    server.pages["a.zip"] = Page(PAGE, kind=kind, etag='"page"')
    with pytest.raises(Unavailable, match=r"sent a web page \('Google Drive - Quota exceeded'\)"):
        fetch(one(server), tmp_path)
    assert len(server.asked) == 3  # and it is not asked again
    assert (tmp_path / "a.zip.part").read_bytes() == before  # nor does it cost what was there
    server.pages["list.txt"] = Page(b"a/b/c.jpg\n", kind="text/plain")
    fetch(Download("list.txt", (Mirror(server.url("list.txt")),)), tmp_path)
    assert (tmp_path / "list.txt").read_bytes() == b"a/b/c.jpg\n"


def test_a_file_believed_once_must_stay_the_same(server: Server, tmp_path: Path) -> None:
    server.pages["a.zip"] = Page(BODY)
    fetch(one(server), tmp_path)
    (tmp_path / "a.zip").unlink()
    server.pages["a.zip"] = Page(OTHER)
    with pytest.raises(Unavailable, match=r"the first download had .*, delete .*a.zip.sha256\)"):
        fetch(one(server), tmp_path)
    assert names(tmp_path) == {"a.zip.sha256", "a.zip.part.json"}
    (tmp_path / "a.zip.sha256").unlink()
    fetch(one(server), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == OTHER


def test_a_file_that_is_there_is_used_or_set_aside(server: Server, tmp_path: Path) -> None:
    server.pages["a.zip"] = Page(BODY)
    (tmp_path / "a.zip").write_bytes(BODY)
    assert fetch(one(server, checksum=MD5), tmp_path) == [f"{tmp_path / 'a.zip'} already exists"]
    assert server.asked == []
    (tmp_path / "a.zip").write_bytes(OTHER)
    fetch(one(server, checksum=MD5), tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert (tmp_path / "a.zip.bad").read_bytes() == OTHER


def test_passing_errors_are_waited_out_and_final_ones_are_not(
    server: Server, tmp_path: Path
) -> None:
    server.pages["a.zip"] = Page(BODY, statuses=[503])
    fetch(one(server), tmp_path)
    assert len(server.asked) == 2
    server.pages["b.zip"] = Page(BODY, statuses=[403] * 9)
    with pytest.raises(Unavailable, match="HTTP 403 Forbidden"):
        fetch(one(server, "b.zip"), tmp_path / "other")
    assert len(server.asked) == 3


def test_a_silent_server_times_out(server: Server, tmp_path: Path) -> None:
    over = threading.Event()
    server.pages["a.zip"] = Page(BODY, cuts=[100_000, 0], stall=over)
    with pytest.raises(Unavailable, match=r"no response for 0.2 s"):
        fetch(one(server), tmp_path, Patience(timeout=0.2, attempts=1, pause=0))
    over.set()


@pytest.mark.parametrize(
    ("page", "timeout", "reason"),
    [
        (Page(BODY, drip=0.01), 5, "too slow: "),
        (Page(BODY, drip=0.01, slow_headers=True), 0.3, "no response for 0.3 s"),
        (Page(BODY, drip=0.4), 0.1, "too slow|no response"),  # a byte in every attempt
    ],
)
def test_a_server_that_drips_is_given_up(
    server: Server, tmp_path: Path, page: Page, timeout: float, reason: str
) -> None:
    server.pages["a.zip"] = page
    patience = Patience(timeout, attempts=2, pause=0, rate=10_000, grace=1)
    with pytest.raises(Unavailable, match=reason):
        fetch(one(server), tmp_path, patience)


@pytest.mark.parametrize(
    ("page", "limit", "reason"),
    [
        (Page(BODY), 100_000, "its size is 300.2 kB, more than 100.0 kB"),
        (Page(BODY, claims="9" * 18), 10**9, "more than 1.0 GB"),
        (Page(BODY, claims="100000", chunked=True), 10**9, "sent more than 100.0 kB; deleted"),
        (Page(BODY, claims="9" * 5000, chunked=True), 100_000, "sent more than 100.0 kB; deleted"),
        (Page(BODY, claims="\u00b2", chunked=True), 100_000, "sent more than 100.0 kB; deleted"),
    ],
)
def test_a_file_larger_than_any_is_not_downloaded(
    server: Server, tmp_path: Path, page: Page, limit: int, reason: str
) -> None:
    server.pages["a.zip"] = page
    with pytest.raises(Unavailable, match=reason):
        fetch(replace(one(server), limit=limit), tmp_path)
    assert not (tmp_path / "a.zip.part").exists()
    assert len(server.asked) == 1


def test_a_full_disk_keeps_what_has_arrived(server: Server, tmp_path: Path) -> None:
    server.pages["a.zip"] = Page(BODY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*a.zip.part: .* Fix this"):
            fetch(one(server), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "a.zip.part").read_bytes() == BODY[:65_536]
    fetch(one(server), tmp_path)
    assert server.asked[-1] == ("a.zip", "bytes=65536-", '"one"')
    assert (tmp_path / "a.zip").read_bytes() == BODY


def test_ctrl_c_keeps_what_has_arrived(server: Server, tmp_path: Path) -> None:
    over = threading.Event()
    server.pages["a.zip"] = Page(BODY, cuts=[100_000], stall=over)
    code = (
        "from pathlib import Path\n"
        "from steppe.domains.fetch import *\n"
        f"download(Download('a.zip', (Mirror({server.url('a.zip')!r}),)), Path({str(tmp_path)!r}))"
    )
    part = tmp_path / "a.zip.part"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + seconds(300)
        while not (part.exists() and part.stat().st_size == 100_000):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(seconds(300)) != 0
    over.set()
    fetch(one(server), tmp_path)
    assert server.asked[-1] == ("a.zip", "bytes=100000-", '"one"')
    assert (tmp_path / "a.zip").read_bytes() == BODY


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    server: Server, tmp_path: Path
) -> None:
    server.pages["a.zip"] = Page(BODY)
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    download(one(server), tmp_path / "bar", console=screen)
    assert "a.zip" in screen.file.getvalue()
    assert "300.2 kB of 300.2 kB" in screen.file.getvalue()
    said = fetch(one(server), tmp_path / "lines")
    assert re.fullmatch(r"a.zip: 300.2 kB of 300.2 kB, [\d.]+ [kMG]B/s", said[0])


# Whole datasets.


def images(root: str, domains: tuple[str, ...], classes: tuple[str, ...]) -> dict[str, bytes]:
    return {f"{root}{d}/{c}/1.jpg": f"{d} {c}".encode() for d in domains for c in classes}


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, contents in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(contents)
            archive.addfile(info, io.BytesIO(contents))
    return buffer.getvalue()


def served(server: Server, name: str, files: dict[str, bytes]) -> DatasetSpec:
    """The dataset, with this server for all its mirrors."""
    spec = dataset_spec(name)
    source = spec.source
    assert source is not None
    assert {item.file for item in source.downloads} == set(files)
    server.pages |= {file: Page(body) for file, body in files.items()}
    downloads = tuple(
        Download(item.file, (Mirror(server.url(item.file)),), item.into)
        for item in source.downloads
    )
    return replace(spec, source=replace(source, downloads=downloads))


def fetch_dataset(spec: DatasetSpec, root: Path) -> list[str]:
    said = io.StringIO()
    folder = get(spec, root, console=Console(file=said), patience=QUICK)
    assert folder == root / str(spec.folder)
    assert not [path for path in root.iterdir() if path.name.startswith(".")]  # no scaffolding
    return said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("name", "file", "inside"),
    [
        ("PACS", "PACS.zip", "kfold/"),
        ("PACS", "PACS.zip", "PACS/"),
        ("VLCS", "VLCS.tar.gz", "VLCS/"),
        ("OfficeHome", "OfficeHomeDataset_10072016.zip", "OfficeHomeDataset_10072016/"),
    ],
)
def test_archives_of_folders(
    server: Server, tmp_path: Path, name: str, file: str, inside: str
) -> None:
    domains = dataset_spec(name).domains
    files = images(inside, domains, ("cat", "dog"))
    files |= images("__MACOSX/", domains, ("cat",))
    body = zipped(files) if file.endswith(".zip") else tarred(files)
    spec = served(server, name, {file: body})
    said = fetch_dataset(spec, tmp_path)
    folder = tmp_path / str(spec.folder)
    classes, domains = spec.read(folder)
    assert classes == ("cat", "dog")
    assert [(d.name, len(d)) for d in domains] == [(d, 2) for d in spec.domains]
    assert (folder / spec.domains[0] / "dog" / "1.jpg").read_text() == f"{spec.domains[0]} dog"
    assert f"unpacking {file}" in said
    # A second time nothing is asked for, and what is there stays as it is.
    (folder / "mine.txt").write_text("mine")
    asked = len(server.asked)
    assert f"steppe data check {name}" in fetch_dataset(spec, tmp_path)[0]
    assert len(server.asked) == asked
    assert (folder / "mine.txt").read_text() == "mine"


def test_terra_incognita_is_sorted_by_its_annotations(server: Server, tmp_path: Path) -> None:
    def annotations(rows: list[tuple[str, int, list[int]]]) -> bytes:
        return json.dumps(
            {
                "info": {},
                "categories": [
                    {"id": 1, "name": "dog"},
                    {"id": 6, "name": "bobcat"},
                    {"id": 33, "name": "car"},
                ],
                "images": [
                    {"id": i, "file_name": f"{i}.jpg", "location": place} for i, place, _ in rows
                ],
                "annotations": [
                    {"image_id": i, "category_id": kind} for i, _, kinds in rows for kind in kinds
                ],
            }
        ).encode()

    train = [("a", 38, [1]), ("b", 38, [1, 1]), ("c", 43, [1, 6]), ("d", 46, [33]), ("e", 7, [1])]
    test = [("f", 100, [6]), ("g", 46, [6])]
    spec = served(
        server,
        "TerraIncognita",
        {
            "eccv_18_annotations.tar.gz": tarred(
                {
                    "eccv_18_annotation_files/train_annotations.json": annotations(train),
                    "eccv_18_annotation_files/cis_test_annotations.json": annotations(test),
                    "eccv_18_annotation_files/._train_annotations.json": b"\0junk",
                }
            ),
            "eccv_18_all_images_sm.tar.gz": tarred(
                {f"eccv_18_all_images_sm/{i}.jpg": i.encode() for i, _, _ in train + test}
            ),
        },
    )
    fetch_dataset(spec, tmp_path)
    folder = tmp_path / "terra_incognita"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {
        "location_38/dog/a.jpg",
        "location_38/dog/b.jpg",
        "location_43/dog/c.jpg",  # two animals: an image of both classes, as in DomainBed
        "location_43/bobcat/c.jpg",
        "location_46/bobcat/g.jpg",  # a car is not a class, and camera 7 is not a domain
        "location_100/bobcat/f.jpg",
    }
    assert (folder / "location_43/dog/c.jpg").read_bytes() == b"c"
    classes, _ = dataset_spec("TerraIncognita").read(folder)
    assert classes == ("bobcat", "dog")


def test_domain_net_comes_in_pieces_with_its_duplicates(server: Server, tmp_path: Path) -> None:
    spec = dataset_spec("DomainNet")
    files = {f"{d}.zip": zipped(images("", (d,), ("ant", "bee"))) for d in spec.domains}
    files["domain_net_duplicates.txt"] = b"real/ant/1.jpg\n"
    fetch_dataset(served(server, "DomainNet", files), tmp_path)
    _, domains = spec.read(tmp_path / "domain_net")
    assert [len(d) for d in domains] == [2, 2, 2, 2, 1, 2]


def test_mnist_is_unzipped(server: Server, tmp_path: Path) -> None:
    source = dataset_spec("RotatedMNIST").source
    assert source is not None
    files = {item.file: gzip.compress(item.file.encode()) for item in source.downloads}
    fetch_dataset(served(server, "RotatedMNIST", files), tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    assert (raw / "t10k-labels-idx1-ubyte").read_text() == "t10k-labels-idx1-ubyte.gz"
    assert len(names(raw)) == 4


def test_when_all_mirrors_are_dead_the_message_says_what_to_do(
    server: Server, tmp_path: Path
) -> None:
    server.pages["page/PACS.zip"] = Page(PAGE, kind="text/html")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/PACS.zip"
    urls = [server.url("gone/PACS.zip"), server.url("page/PACS.zip"), closed]
    source = Source(
        (Download("PACS.zip", tuple(map(Mirror, urls))),), elsewhere=("https://example.org/pacs",)
    )
    spec = replace(dataset_spec("PACS"), source=source)
    with pytest.raises(UserError) as error:
        get(spec, tmp_path, patience=QUICK)
    assert str(error.value).splitlines() == [
        "PACS cannot be downloaded: no mirror has PACS.zip:",
        f"  {urls[0]}: HTTP 404 Not Found",
        f"  {urls[1]}: sent a web page ('Google Drive - Quota exceeded') instead of the file",
        f"  {urls[2]}: [Errno {errno.ECONNREFUSED}] Connection refused",
        "Where else to look:",
        "  https://example.org/pacs",
        "  the paper: Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
        f"Put PACS.zip in {tmp_path / 'downloads'} and rerun the command,",
        "or arrange the files as",
        f"  {tmp_path}/PACS/art_painting/CLASS/IMAGE",
        f"  {tmp_path}/PACS/cartoon/CLASS/IMAGE",
        f"  {tmp_path}/PACS/photo/CLASS/IMAGE",
        f"  {tmp_path}/PACS/sketch/CLASS/IMAGE",
        "with 7 classes in every domain,",
        f"then run: steppe data check PACS --root {tmp_path}",
    ]
    assert not (tmp_path / "PACS").exists()
    # What it says works: the archive put there by hand is taken.
    files = images("kfold/", dataset_spec("PACS").domains, ("dog",))
    (tmp_path / "downloads" / "PACS.zip").write_bytes(zipped(files))
    fetch_dataset(spec, tmp_path)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            zipped({"kfold/photo/dog/1.jpg": b"x"}),
            "should contain art_painting, .*; found filler, k",
        ),
        (zipped({"kfold/photo/dog/1.jpg": b"x"})[:-30], "PACS.zip is damaged"),
        (zipped({"kfold/photo/dog/1.jpg": b"x", "../evil": b"x"}), "'../evil' leaves the folder"),
    ],
)
def test_a_bad_archive_leaves_nothing_behind(
    server: Server, tmp_path: Path, body: bytes, reason: str
) -> None:
    spec = served(server, "PACS", {"PACS.zip": body})
    with pytest.raises(UserError, match=reason):
        get(spec, tmp_path, patience=QUICK)
    assert names(tmp_path) == {"downloads"}


def test_no_room_to_unpack_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    files = images("kfold/", dataset_spec("PACS").domains, ("dog",)) | {"kfold/big": bytes(70_000)}
    spec = served(server, "PACS", {"PACS.zip": gzip.compress(b"")})
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "PACS.zip").write_bytes(zipped(files))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(UserError, match="no room to unpack in .*nothing is downloaded twice"):
            get(spec, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == {"downloads"}
    fetch_dataset(spec, tmp_path)


def test_an_incomplete_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "PACS" / "photo").mkdir(parents=True)
    with pytest.raises(UserError, match="without art_painting, cartoon, sketch. Move it away"):
        get(dataset_spec("PACS"), tmp_path)
    assert names(tmp_path / "PACS") == {"photo"}


def test_datasets_without_a_download_say_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="RotatedDigits needs no download"):
        get(dataset_spec("RotatedDigits"), tmp_path)
    with pytest.raises(UserError) as error:
        get(dataset_spec("NICO++"), tmp_path)
    message = str(error.value)
    assert message.startswith("NICO++ must be downloaded by hand.")
    assert "https://nicochallenge.com/dataset" in message
    assert f"  {tmp_path / 'NICO++' / 'autumn'}/CLASS/IMAGE" in message
    assert message.endswith(f"then run: steppe data check NICO++ --root {tmp_path}")


def test_the_table_is_complete_and_well_formed() -> None:
    for spec in map(dataset_spec, dataset_names()):
        assert (spec.source is None) == (spec.folder is None)
        source = spec.source or Source()
        assert bool(source.elsewhere) == (spec.folder is not None), spec.name
        for item in source.downloads:
            for mirror in item.mirrors:
                assert re.match(r"https?://[\w.-]+/", mirror.url)
                if mirror.checksum is not None:
                    assert re.fullmatch(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", mirror.checksum)
    assert len(terra_incognita.CATEGORIES) == 10

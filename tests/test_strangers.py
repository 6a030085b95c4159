"""Files from strangers are read with limits; a flipped bit shows; a failed write loses nothing."""

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from steppe.durable import replace
from steppe.sealed import KEY, Broken, seal, unseal
from steppe.strangers import parse, printable, read


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [fifo, device, folder])
def test_only_plain_files_are_read(tmp_path, make):
    make(tmp_path / "x.json")
    with pytest.raises(OSError, match="not a plain file") as told:
        read(tmp_path / "x.json")
    assert told.value.filename == str(tmp_path / "x.json")


def test_a_socket_is_not_read(tmp_path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "x"))
        with pytest.raises(OSError, match="No such device"):
            read(tmp_path / "x")


def test_a_file_larger_than_any_of_ours_is_refused_before_it_fills_the_memory(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(2**40)  # takes no room
    with pytest.raises(OSError, match="more than"):
        read(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"12345")
    assert read(tmp_path / "y", 5) == b"12345"
    (tmp_path / "z").touch()
    assert read(tmp_path / "z", sys.maxsize) == b""
    assert read("/proc/self/status").startswith(b"Name:")


@pytest.mark.parametrize(
    ("text", "why"),
    [("[" * 100_000, "nested"), ("9" * 10_000, "digits"), ("{", "Expecting"), ("", "Expecting")],
)
def test_json_that_cannot_be_read_is_a_value_error(text, why):
    with pytest.raises(ValueError, match=why):
        parse(text)


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.floats(allow_nan=False)))
def test_a_sealed_object_comes_back(facts):
    facts = {"kind": "claim"} | {k: v for k, v in facts.items() if k != KEY}
    assert unseal(seal(json.dumps(facts))) == facts
    assert unseal(seal(json.dumps(facts, indent=1) + "\n")) == facts
    assert unseal(json.dumps(facts).encode()) == facts  # of an earlier version


def test_no_flipped_bit_of_a_sealed_object_is_another_value():
    facts = {"kind": "released", "time": 1234.5, "attempt": 1, "worker": "node-7"}
    data = seal(json.dumps(facts))
    caught = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = unseal(bytes(flipped))
        except ValueError:
            caught += 1
            continue
        assert {key: found[key] for key in facts} == facts  # only the seal itself was hit
    assert caught > 8 * len(json.dumps(facts)) - 8
    with pytest.raises(Broken):
        unseal(data.replace(b"released", b"seleased"))


def test_printable_leaves_ordinary_texts_alone():
    assert printable("Größe 三\tx\n") == "Größe 三\tx\n"
    assert printable("a\u00a0b\u3000c\u200d") == "a\u00a0b\u3000c\u200d"
    assert printable("\x1b]0;title\x07\udcff\u202e") == r"\x1b]0;title\x07\udcff\u202e"


def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path):
    target = tmp_path / "report.html"
    target.write_bytes(b"old")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="too large") as told:
            replace(target, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert told.value.filename == str(target)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_replace_follows_links_and_writes_into_devices(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    replace(tmp_path / "link", b"new")
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()
    replace(Path("/dev/null"), b"x")
    assert not Path("/dev/null").is_file()


def test_replace_writes_into_a_pipe_under_its_usual_name(tmp_path):
    reader, writer = os.pipe()
    replace(Path(f"/dev/fd/{writer}"), b"to whoever reads")
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"to whoever reads"


def test_a_folder_of_ones_own_may_be_called_fd(tmp_path):
    (tmp_path / "fd").mkdir()
    path = tmp_path / "fd" / "report"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        replace(path, b"new")
        assert reader.read() == b"old"  # another file has taken its name


def test_replace_keeps_the_mode_and_takes_long_names(tmp_path):
    path = tmp_path / ("x" * 251 + ".csv")
    replace(path, b"old")
    path.chmod(0o600)
    replace(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert len(os.listdir(tmp_path)) == 1


def test_two_writers_at_once_leave_a_whole_file(tmp_path):
    path, sizes = tmp_path / "report", (10, 500_000)
    children = []
    for size in sizes:
        child = os.fork()
        if not child:
            for _ in range(50):
                replace(path, b"x" * size)
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0  # none failed
    assert path.stat().st_size in sizes
    assert os.listdir(tmp_path) == ["report"]


def test_what_a_killed_writer_left_is_used_again(tmp_path):
    (tmp_path / ".state.writing").write_bytes(b"half of something longer")
    replace(tmp_path / "state", b"done")
    assert (tmp_path / "state").read_bytes() == b"done"
    assert os.listdir(tmp_path) == ["state"]


def test_replace_does_not_write_through_a_link_that_lies_in_wait(tmp_path):
    (tmp_path / "mine").write_bytes(b"keep")
    (tmp_path / ".state.writing").symlink_to("mine")
    replace(tmp_path / "state", b"done")
    assert (tmp_path / "mine").read_bytes() == b"keep"

"""Files are read within bounds, written whole or not at all, and every error is one line."""

import builtins
import os
import stat
import threading
from pathlib import Path

import pytest

from usp import files
from usp.errors import InputError


def refusal(work, *args) -> str:
    with pytest.raises(InputError) as caught:
        work(*args)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def denied(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_reading(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("größe: 1\n", encoding="utf-8")
    assert files.read(path) == files.read(str(path)) == "größe: 1\n"


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_bytes(b" " * files.MOST_BYTES)
    assert len(files.read(path)) == files.MOST_BYTES
    path.write_bytes(b" " * (files.MOST_BYTES + 1))
    assert "more than 1,048,576 bytes" in refusal(files.read, path)
    os.truncate(path, 2**40)  # takes no room on the disk
    assert "more than 1,048,576 bytes" in refusal(files.read, path)
    assert "more than 1,048,576 bytes" in refusal(files.read, "/dev/zero")


@pytest.mark.parametrize("name", ["", "absent", "absent/x", ".", "a\0b", "x" * 5000, "two\nlines", "\udcff", "\ud800"])
@pytest.mark.parametrize("work", [files.read, lambda path: files.write(path, "x")], ids=["read", "write"])
def test_what_is_no_file(tmp_path, monkeypatch, work, name):
    monkeypatch.chdir(tmp_path)
    if work is files.read or name not in ("absent", "two\nlines", "\udcff"):
        assert "cannot " in refusal(work, name)
    else:
        work(name)
        assert [path.read_text() for path in tmp_path.iterdir()] == ["x"]


def test_what_may_not_be_read_or_written(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_text("old")
    monkeypatch.setattr(builtins, "open", denied)
    assert refusal(files.read, path) == f"cannot read {path}: Permission denied"
    assert refusal(files.write, path, "new") == f"cannot write {path}: Permission denied"
    monkeypatch.undo()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.yaml"]


def test_writing(tmp_path):
    path = tmp_path / "a.yaml"
    for content in ("größe\n", b"\xff\x00"):
        files.write(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["a.yaml"]


@pytest.mark.parametrize("failing", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stopped"]
)
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, failing, error):
    path = tmp_path / "a.yaml"
    path.write_text("old")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else InputError, match=r"No space|^$"):
        files.write(path, "new" * 10**6)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.yaml"]


def test_nobody_sees_a_part(tmp_path, monkeypatch):
    """Until the new file has all its bytes on the disk, its name has the old ones."""
    path, order = tmp_path / "a.yaml", []
    path.write_text("old")
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: order.append(("fsync", path.read_text())) or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda a, b: order.append(("replace", Path(a).read_text())) or replace(a, b))
    files.write(path, "new")
    assert order == [("fsync", "old"), ("replace", "new")] and path.read_text() == "new"


def test_permissions_and_links_stay(tmp_path):
    path, link = tmp_path / "a.yaml", tmp_path / "link.yaml"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    fresh = tmp_path / "b.yaml"
    before = os.umask(0o027)
    try:
        files.write(fresh, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o640


def test_what_is_no_regular_file_is_written_to(tmp_path):
    """A rename over /dev/null would take it away from everyone."""
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    files.write(pipe, "new")
    reader.join(10)
    assert got == ["new"] and stat.S_ISFIFO(pipe.stat().st_mode)
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    files.write(null, "new")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

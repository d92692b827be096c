"""Files as they are written: with the permissions of any other new file, and errors that name them."""

import errno
import os
import resource
import stat
from contextlib import contextmanager

import pytest
import torch

from diffusion_lens.loading import save_tokenizer
from weight_conversion import open_checkpoint, renamed_when_whole, write_json, write_safetensors


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path, monkeypatch, umask):
    before = os.umask(umask)
    try:
        with monkeypatch.context() as process:  # the umask belongs to all threads of the process
            process.setattr(os, "umask", lambda mask: pytest.fail(f"the umask was set to {mask:o}"))
            write_json({"a": 1}, tmp_path / "a.json")
            with renamed_when_whole(tmp_path / "b.txt") as part:
                part.write_text("while it is written, too")
                modes = [stat.S_IMODE(part.stat().st_mode)]
    finally:
        os.umask(before)
    modes += [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.json", "b.txt")]
    assert modes == [0o666 & ~umask] * 3


@contextmanager
def full_disk():
    """No file can be larger than a kilobyte, an error like that of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda path, _: write_safetensors({"a": torch.zeros(1 << 16)}, path / "result.safetensors"), "result"),
        (lambda path, _: write_json({"a": "b" * (1 << 16)}, path / "result.json"), "result"),
        (lambda path, tokenizer: save_tokenizer(tokenizer, path, prepends_bos=True), "tokenizer"),
    ],
)
def test_the_error_of_a_full_disk_names_the_path(tmp_path, tiny, write, name):
    with full_disk(), pytest.raises(OSError, match=rf"{tmp_path}/{name}\S* was not written: .*File too large") as error:
        write(tmp_path, tiny.tokenizer)
    assert error.value.errno == errno.EFBIG or name == "tokenizer"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_for_the_temporary_file_is_named(tmp_path, monkeypatch):
    def no_space(*given, **how):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), given[0])

    monkeypatch.setattr(os, "open", no_space)
    with pytest.raises(OSError, match=r"a\.json was not written: No space left") as error:
        write_json({}, tmp_path / "a.json")
    assert error.value.errno == errno.ENOSPC


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("by", ["path", "folder"])
def test_a_checkpoint_that_is_no_file_is_refused_unread(tmp_path, make, suffix, by, refused):
    path = tmp_path / f"model{suffix}"
    make(path)
    what = "a folder" if make is os.mkdir else "a pipe or a device"
    error, words = ValueError, [f"{path} is {what}"]
    if make is os.mkdir and by == "path":  # a folder of any name may contain a checkpoint
        error, words = FileNotFoundError, [f"the folder {path} should contain one"]
    refused(error, *words, do=open_checkpoint, path=path if by == "path" else tmp_path)

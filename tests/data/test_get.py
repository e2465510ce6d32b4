"""Getting data sets from the web, with all that goes wrong there."""

import hashlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import archives
from polytempo.core.errors import PolytempoError
from polytempo.data import Federation, cache, download, fetch, get
from polytempo.data.origin import ORIGINS
from polytempo.files import Claim
from websites import Site, website

pytestmark = pytest.mark.usefixtures("no_data")
HEART = "heart+disease.zip"
MNIST = tuple(remote.file for remote in ORIGINS["mnist"].remotes)


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Serves the archives of heart disease, MNIST and its writers."""
    made = tmp_path_factory.mktemp("made")
    with website() as found:
        for maker in (archives.heart_disease, archives.mnist, archives.mnist_writers):
            found.files |= {path.name: path.read_bytes() for path in maker(made)}
        yield found


def digest(content: bytes, kind: str = "md5") -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def expect(monkeypatch: pytest.MonkeyPatch, site: Site, *names: str) -> None:
    """Let the hashes of the small archives be the official ones."""
    for name in names:
        origin = ORIGINS[name]
        remotes = [replace(each, digest=digest(site.files[each.file])) for each in origin.remotes]
        monkeypatch.setitem(ORIGINS, name, replace(origin, remotes=tuple(remotes)))


def heart(site: Site, folder: Path, **options: object) -> object:
    return get("heart-disease", data_dir=folder, urls=[site.url], **options)


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_set_is_downloaded_checked_converted_and_remembered(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    told = []
    got = heart(site, folder, report=lambda *progress: told.append(progress))
    assert got.new and got.name == "heart_disease" and got.samples == 38
    content = site.files[HEART]
    assert told[0] == (HEART, 0, len(content)) and (HEART, len(content), len(content)) in told
    assert told[-1] == ("converting heart_disease", 0, 0)
    assert left(folder) == {"heart_disease4.npz", "downloads.json"}
    kept = json.loads((folder / "downloads.json").read_text())["heart_disease"][HEART]
    assert kept["sha256"] == hashlib.sha256(content).hexdigest()
    assert kept["url"] == site.url + HEART and kept["bytes"] == len(content)
    assert any("no hash" in remark for remark in got.remarks)
    assert any("38 samples; the official data set has 920" in remark for remark in got.remarks)
    assert Federation.load("heart_disease", data_dir=folder).clients == 4


def test_what_is_there_is_not_downloaded_again_unless_forced(site: Site, tmp_path: Path) -> None:
    heart(site, tmp_path)
    site.asked.clear()
    again = heart(site, tmp_path)
    assert not again.new and again.path == tmp_path / "heart_disease4.npz" and not site.asked
    assert heart(site, tmp_path, force=True).new and len(site.asked) == 1


def test_without_a_folder_sets_are_in_the_cache_of_the_user(site: Site) -> None:
    got = get("heart-disease", urls=[site.url])
    assert got.path == cache.cache_dir() / "data" / "heart_disease4.npz"
    assert Federation.load("heart_disease").clients == 4


def test_several_files_are_checked_each_and_what_a_set_needs_comes_too(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, site, "mnist", "mnist_writers")
    got = get("mnist-writers", data_dir=tmp_path, urls=[site.url])
    assert not any("hash" in remark for remark in got.remarks)
    assert left(tmp_path) >= {"mnist.npz", "mnist_writers.npz"}
    assert Federation.load("mnist_writers", data_dir=tmp_path).clients == 8
    kept = json.loads((tmp_path / "downloads.json").read_text())
    assert {file: kept["mnist"][file]["checked"] for file in MNIST} == dict.fromkeys(MNIST, "md5")


def test_a_broken_connection_is_resumed_where_it_broke(site: Site, tmp_path: Path) -> None:
    size = len(site.files[HEART])
    site.cut, site.cut_after = 3, size // 5
    heart(site, tmp_path)
    starts = [f"bytes={size // 5 * times}-" for times in (1, 2, 3)]
    assert site.asked == [(HEART, None), *((HEART, start) for start in starts)]
    assert site.sent == size, "no byte is sent twice"
    assert Federation.load("heart_disease", data_dir=tmp_path).clients == 4


def test_a_download_that_was_given_up_is_resumed_by_the_next_call(
    site: Site, tmp_path: Path
) -> None:
    site.stuck = 400
    with pytest.raises(PolytempoError, match=r"broke off after 400 bytes, 4 times more; the same"):
        heart(site, tmp_path)
    assert left(tmp_path) == {f"downloads/{HEART}.part", f"downloads/{HEART}.part.json"}
    site.stuck = None
    site.asked.clear()
    assert heart(site, tmp_path).new
    assert site.asked == [(HEART, "bytes=400-")]
    assert left(tmp_path) == {"heart_disease4.npz", "downloads.json"}


def test_an_interrupted_download_is_resumed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK", 100)

    def stop(file: str, done: int, total: int) -> None:
        if done >= 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heart(site, tmp_path, report=stop)
    site.asked.clear()
    assert heart(site, tmp_path).new and site.asked == [(HEART, "bytes=300-")]


def test_a_server_without_ranges_sends_all_of_it_again(site: Site, tmp_path: Path) -> None:
    site.ranges, site.cut, site.cut_after = False, 1, 100
    heart(site, tmp_path)
    assert site.asked == [(HEART, None), (HEART, "bytes=100-")]
    assert Federation.load("heart_disease", data_dir=tmp_path).clients == 4


def test_parts_of_two_versions_are_never_joined(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = site.files[HEART]
    for versions in (True, False):
        folder = tmp_path / str(versions)
        site.versions, site.files[HEART] = versions, b"another version" * 100
        site.stuck = 100
        with pytest.raises(PolytempoError):
            heart(site, folder)
        site.stuck, site.files[HEART] = None, new
        site.asked.clear()
        assert heart(site, folder).new
        # Without a way to tell, and without a hash, the rest is not even asked for.
        assert [wanted is not None for _, wanted in site.asked] == [versions]
    # A hash tells in the end, so that the part is used.
    expect(monkeypatch, site, "heart_disease")
    site.cut, site.cut_after = 1, 100
    heart(site, tmp_path / "hash")
    assert site.asked[-1] == (HEART, "bytes=100-")


def test_a_part_that_is_whole_already_is_used(site: Site, tmp_path: Path) -> None:
    site.stuck = 100
    with pytest.raises(PolytempoError):
        heart(site, tmp_path)
    part = tmp_path / "downloads" / f"{HEART}.part"
    part.write_bytes(site.files[HEART])
    site.stuck, site.sent = None, 0
    assert heart(site, tmp_path).new and site.sent == 0


def test_a_wrong_hash_is_refused_and_the_next_mirror_is_tried(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, site, "heart_disease")
    right = site.files[HEART]
    site.files[HEART] = right[:-1] + b"x"
    with pytest.raises(PolytempoError) as caught:
        heart(site, tmp_path)
    assert f"expected {digest(right)[4:]}" in str(caught.value)
    assert digest(site.files[HEART])[4:] in str(caught.value) and "--from" in str(caught.value)
    assert left(tmp_path) == set()
    site.files[f"mirror/{HEART}"] = right
    got = get("heart_disease", data_dir=tmp_path, urls=[site.url, f"{site.url}mirror/"])
    assert got.new


def test_a_second_download_is_compared_with_the_first(site: Site, tmp_path: Path) -> None:
    heart(site, tmp_path)
    before = (tmp_path / "heart_disease4.npz").read_bytes()
    site.files[HEART] = archives.zipped({"processed.va.data": b"changed"})
    with pytest.raises(
        PolytempoError, match=r"another content.*downloaded before.*downloads\.json"
    ):
        heart(site, tmp_path, force=True)
    assert (tmp_path / "heart_disease4.npz").read_bytes() == before, "what was good is untouched"


def test_a_page_in_place_of_an_archive_leaves_nothing(site: Site, tmp_path: Path) -> None:
    right = site.files[HEART]
    site.files[HEART] = b"<html>log in first</html>"
    with pytest.raises(PolytempoError, match="cannot be read"):
        heart(site, tmp_path / "data")
    assert left(tmp_path / "data") == set()
    site.files[HEART] = right
    assert heart(site, tmp_path / "data").new, "the page was not remembered"


def remedies(message: str) -> bool:
    return all(part in message for part in ("--url", "polytempo data get heart_disease --from"))


def test_a_file_that_is_not_there_is_said_with_what_to_do(site: Site, tmp_path: Path) -> None:
    del site.files[HEART]
    with pytest.raises(PolytempoError, match=r"does not give it \(404 Not Found\)") as caught:
        heart(site, tmp_path / "data")
    assert remedies(str(caught.value)) and left(tmp_path / "data") == set()


def test_without_a_network_the_remedies_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound but not listening: nobody else answers there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(PolytempoError, match="cannot be reached") as caught:
            get("heart_disease", data_dir=tmp_path, urls=[url])
    assert remedies(str(caught.value)) and left(tmp_path) == set()


def test_addresses_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolytempoError, match=r"not an http:// or https:// address.*--from"):
        get("mnist", data_dir=tmp_path, urls=["file:///etc/passwd"])
    with pytest.raises(PolytempoError, match="mnist has 4 files, but --url was given 1 times"):
        get("mnist", data_dir=tmp_path, urls=["http://127.0.0.1/train.gz"])
    with pytest.raises(PolytempoError, match=r"'cifar11' cannot be downloaded.*'cifar10'"):
        get("cifar11", data_dir=tmp_path)
    with pytest.raises(PolytempoError, match="mnist_writers needs mnist too"):
        get("mnist_writers", data_dir=tmp_path, files=[tmp_path])


def test_two_downloads_into_one_folder_do_not_mix(site: Site, tmp_path: Path) -> None:
    with (
        Claim(tmp_path / "downloads"),
        pytest.raises(PolytempoError, match=r"is being written by another.*--data-dir"),
    ):
        heart(site, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PolytempoError, match=r"cannot be made.*choose another --data-dir"):
        heart(site, tmp_path / "file")


def test_a_disk_without_room_is_noticed_before(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = download.shutil.disk_usage(tmp_path)._replace(free=499)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PolytempoError, match="has 0 kB left; free some space or choose another"):
        heart(site, tmp_path)
    assert "heart_disease4.npz" not in left(tmp_path)


def test_archives_that_differ_from_the_official_ones_are_used_but_said(tmp_path: Path) -> None:
    got = get("mnist", data_dir=tmp_path, files=archives.mnist(tmp_path))
    assert got.new and sum("differs from the official file" in each for each in got.remarks) == 4


def test_every_origin_is_whole() -> None:
    assert set(ORIGINS) == set(archives.MAKERS)
    for name, origin in ORIGINS.items():
        assert origin.own[0][0].endswith((".npz", ".json.xz")) and len(origin.own[0]) == 1
        assert origin.remotes and origin.licence and origin.page.startswith("http")
        for remote in origin.remotes:
            kind, _, value = (remote.digest or "md5:" + "0" * 32).partition(":")
            assert len(value) == {"md5": 32, "sha256": 64}[kind] and int(value, 16) >= 0
            assert all(url.startswith("http") for url in remote.urls), name


def test_a_download_that_cannot_be_stored_need_not_come_again(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, arrays: dict) -> None:
        raise PolytempoError("no space left")

    with monkeypatch.context() as patched, pytest.raises(PolytempoError, match="no space left"):
        patched.setattr(fetch, "write", full)
        heart(site, tmp_path)
    assert left(tmp_path) == {f"downloads/{HEART}"}
    site.asked.clear()
    assert heart(site, tmp_path).new and not site.asked
    assert left(tmp_path) == {"heart_disease4.npz", "downloads.json"}

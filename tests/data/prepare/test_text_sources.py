"""The files that are read, and how they are cut into parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.data.prepare import text_sources as prepare_sources
from axsparse.data.prepare.documents import UNREADABLE, Reading
from axsparse.data.prepare.text_sources import (
    Filter,
    Source,
    Sources,
    Stretch,
    bytes_of,
    cut,
    find_sources,
    pieces_of,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(found: Sources) -> list[str]:
    return [Path(source.path).name for source in found.files]


def test_files_below_a_folder_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    root = write(tmp_path, b="1", a__z="22", a__b__c="3", **{"a.txt": "4", ".hidden": "5"})
    write(root, **{".git__config": "6", "out__train": "7"})
    (root / "loop").symlink_to(root, target_is_directory=True)

    found = find_sources([root], [], root / "out")

    assert [source.name.removeprefix(f"{root}/") for source in found.files] == [
        *("a.txt", "a/b/c", "a/z", "b"),
    ]
    assert [source.size for source in found.files] == [1, 1, 2, 1]


def test_a_file_counts_once_and_as_validation_data_if_it_is_named_so(tmp_path: Path) -> None:
    root = write(tmp_path, a="1", b="2")
    (root / "link").symlink_to(root / "a")

    found = find_sources([root, root / "a"], [root / "b"], root / "out")

    assert sorted((Path(s.path).name, s.validation) for s in found.files) == [
        *(("a", False), ("b", True)),
    ]


def test_what_is_no_file_is_counted_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    root = write(tmp_path, a="1")
    (root / "lost").symlink_to("/nowhere")
    os.mkfifo(root / "pipe")

    assert find_sources([root], [], root / "out").unreadable == (f"{root}/lost", f"{root}/pipe")
    for name in ("lost", "pipe", "missing"):
        with pytest.raises(MissingInputError, match=f"{name} is neither a file nor a folder"):
            find_sources([root / name], [], root / "out")


def source_of(path: Path) -> Source:
    (source,) = find_sources([path], [], path / "out").files
    return source


def test_small_files_share_a_part_and_large_ones_are_divided(tmp_path: Path) -> None:
    write(tmp_path, a="1" * 4, b="2" * 5, c="3" * 5, d="word " * 5, e="4")

    parts, _ = cut(find_sources([tmp_path], [], tmp_path / "o"), Reading(), 10)

    stretches = [[(Path(s.source.path).name, s.begin, s.end) for s in part] for part in parts]
    assert stretches == [
        [("a", 0, 4), ("b", 0, 5)],
        [("c", 0, 5)],
        *([("d", 0, 14)], [("d", 14, 24)], [("d", 24, 25)]),
        [("e", 0, 1)],
    ]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lines=st.lists(st.text("ab é\U0001f600=", max_size=9), max_size=30),
    how=st.sampled_from(["none", "blank-line", "lines:2", "regex:="]),
    part_bytes=st.integers(1, 40),
    window=st.integers(4, 40),
)
def test_parts_cover_a_file_without_cutting_a_character_or_a_line(
    lines: list[str],
    how: str,
    part_bytes: int,
    window: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = "\n".join(lines).encode()
    path = tmp_path_factory.mktemp("cut") / "file"
    path.write_bytes(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_sources, "WINDOW", window)
        parts, _ = cut(Sources((source_of(path),), ()), Reading(how), part_bytes)

    bounds = [(stretch.begin, stretch.end) for part in parts for stretch in part]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == bytes_of(parts) == len(data)
    for begin, end in bounds:
        data[begin:end].decode()
        assert how == "none" or begin == 0 or data[begin - 1 : begin] == b"\n"


def test_a_jsonl_file_is_cut_between_lines_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_sources, "WINDOW", 8)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1234\n" + b"x" * 90 + b"\n12\n" + b"y" * 5)

    parts, _ = cut(Sources((source_of(path),), ()), Reading(), 10)

    assert [(part[0].begin, part[0].end) for part in parts] == [(0, 96), (96, 104)]


def test_a_document_is_cut_before_its_first_line_where_one_is_near(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"# a\nb\nc\nd\n# e\nf\n")

    parts, _ = cut(Sources((source_of(path),), ()), Reading("regex:^#"), 5)

    assert [(part[0].begin, part[0].end) for part in parts] == [(0, 10), (10, 16)]


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, a="before") / "a"
    source = source_of(path)
    path.write_text("behind")
    os.utime(path, ns=(0, 0))

    with pytest.raises(DataError, match="a changed while it was being prepared; leave it alone"):
        list(pieces_of(Stretch(source, 0, 6), Reading()))


@pytest.mark.parametrize("name", ["a", "a.jsonl"])
def test_a_file_that_disappears_meanwhile_is_unreadable(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text")
    source = source_of(tmp_path / name)
    (tmp_path / name).unlink()

    (piece,) = pieces_of(Stretch(source, 0, 4), Reading())

    assert (piece.problem, piece.opens, piece.closes) == (UNREADABLE, True, True)


def test_a_large_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, a="x" * 50) / "a"
    source = source_of(path)
    path.unlink()

    assert cut(Sources((source,), ("b",)), Reading(), 10) == ([], Sources((), ("b", str(path))))


@pytest.mark.parametrize(
    ("include", "exclude", "read"),
    [
        ((), (), ["a.txt", "b.md", "drafts/c.txt", "drafts/old/d.txt"]),
        (("*.txt",), (), ["a.txt", "drafts/c.txt", "drafts/old/d.txt"]),
        (("*.txt", "*.md"), ("drafts/*",), ["a.txt", "b.md"]),
        (("drafts/*",), ("drafts/old/*",), ["drafts/c.txt"]),
    ],
)
def test_patterns_say_which_files_of_a_folder_are_read(
    include: tuple[str, ...], exclude: tuple[str, ...], read: list[str], tmp_path: Path
) -> None:
    (tmp_path / "drafts" / "old").mkdir(parents=True)
    for name in ("a.txt", "b.md", "drafts/c.txt", "drafts/old/d.txt"):
        (tmp_path / name).write_text("x")

    found = find_sources([tmp_path], [], tmp_path / "out", Filter(include, exclude))

    assert [Path(file.path).relative_to(tmp_path).as_posix() for file in found.files] == read


def test_a_file_that_is_named_itself_is_read_whatever_the_patterns(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")

    found = find_sources([tmp_path / "a.md"], [], tmp_path / "out", Filter(("*.txt",)))

    assert len(found.files) == 1


def test_patterns_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")

    with pytest.raises(ConfigError, match="no file is left by --include and --exclude; a pattern"):
        find_sources([tmp_path], [], tmp_path / "out", Filter(("*.txt",)))

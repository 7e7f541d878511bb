"""Finding documents in files, and those that cannot be used."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from axsparse.data.prepare.documents import (
    EMPTY,
    HUGE_LINE,
    MALFORMED_JSON,
    MISSING_FIELD,
    NOT_UTF8,
    Piece,
    Problem,
    Reading,
    Splitter,
    record_pieces,
    text_pieces,
)
from axsparse.runtime.errors import ConfigError


def whole(data: bytes, how: str = "none", max_line: int = 100) -> Iterator[Piece]:
    return text_pieces(data, 0, len(data), Splitter(how), max_line, mid_line=False)


def texts(data: bytes, how: str) -> list[str]:
    """The documents of a file, except those of white space only."""
    return [piece.text for piece in whole(data, how) if not piece.blank]


@pytest.mark.parametrize(
    ("how", "documents"),
    [
        ("none", ["= A =\nx\n \n\ny\n= B =\nz"]),
        ("blank-line", ["= A =\nx\n", "y\n= B =\nz"]),
        ("lines:2", ["= A =\nx\n", "y\n= B =\n", "z"]),
        ("regex:^= .* =$", ["= A =\nx\n \n\ny\n", "= B =\nz"]),
    ],
)
def test_a_file_is_split_as_it_is_told(how: str, documents: list[str]) -> None:
    assert texts(b"= A =\nx\n \n\ny\n= B =\nz", how) == documents


def test_a_pattern_sees_a_line_without_its_end_and_what_precedes_it_is_a_document() -> None:
    assert texts(b"first\r\n#\r\nx\r\n", "regex:^#$") == ["first\r\n", "#\r\nx\r\n"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("paragraph", r"'paragraph' is no way to split; choose none, blank-line, lines:N"),
        ("lines:0", r"'lines:0' is no way to split"),
        ("lines:x", r"is no way to split"),
        ("regex", r"is no way to split"),
        ("regex:(", r"'\(' is no regular expression \(missing \), unterminated subpattern at"),
    ],
)
def test_other_ways_of_splitting_are_refused(how: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Splitter(how)


def problems(pieces: Iterator[Piece]) -> list[tuple[int, Problem | None]]:
    return [(piece.at, piece.problem) for piece in pieces if piece.problem or not piece.blank]


def test_a_document_that_cannot_be_used_spoils_no_other() -> None:
    data = b"good\n\n\xff\n\n" + b"y" * 101 + b"\n\nalso good\n"

    assert problems(whole(data, "blank-line")) == [
        *((0, None), (6, NOT_UTF8), (9, HUGE_LINE), (112, None)),
    ]


@pytest.mark.parametrize("length", [100, 101])
@pytest.mark.parametrize("before", [b"", b"ab\n" * 40, b"c\n"])
def test_the_longest_line_is_the_longest_allowed(length: int, before: bytes) -> None:
    (piece,) = whole(before + b"x" * length + b"\nz\n")

    assert piece.problem == (HUGE_LINE if length > 100 else None)


@pytest.mark.parametrize("how", ["none", "blank-line", "lines:3", "regex:x"])
@pytest.mark.parametrize("data", [b"", b" \n\n", b"\xef\xbb\xbf", "\u3000\n".encode()])
def test_a_file_of_white_space_is_one_empty_document(data: bytes, how: str) -> None:
    assert problems(whole(data, how)) == [(0, EMPTY)]


def test_a_byte_order_mark_is_no_text() -> None:
    assert texts(b"\xef\xbb\xbfa\xef\xbb\xbf", "none") == ["a\ufeff"]


def test_a_block_goes_on_with_one_document_and_leaves_one_open() -> None:
    pieces = list(
        text_pieces(b"end\n\nall\n\nbeg", 50, 99, Splitter("blank-line"), 9, mid_line=True)
    )

    assert [(p.at, p.text, p.opens, p.closes) for p in pieces] == [
        (50, "end\n", False, True),
        (55, "all\n", True, True),
        (60, "beg", True, False),
    ]


def test_what_is_left_of_a_line_begins_no_document() -> None:
    at_line, within = (
        [
            piece.text
            for piece in text_pieces(b"#\n#\n", 5, 9, Splitter("regex:#"), 9, mid_line=mid_line)
        ]
        for mid_line in (False, True)
    )

    assert at_line == ["", "#\n", "#\n"]
    assert within == ["#\n", "#\n"]


def test_a_piece_tells_how_long_its_outer_lines_are() -> None:
    (piece,) = text_pieces(b"abc\nd\nef", 5, 99, Splitter("none"), 9, mid_line=True)
    (inside,) = text_pieces(b"abc", 5, 99, Splitter("none"), 9, mid_line=True)

    assert (piece.lead, piece.trail) == (3, 2)
    assert (inside.lead, inside.trail) == (3, None)


# -- JSONL ----------------------------------------------------------------------------------

RECORDS = {
    b'{"text": "a\\nb", "id": 1}': ("a\nb", None),
    b'{"id": 1}': ("", MISSING_FIELD),
    b'{"text": null}': ("", MISSING_FIELD),
    b'["text"]': ("", MISSING_FIELD),
    b'{"text": "x"': ("", MALFORMED_JSON),
    b"[" * 100_000: ("", MALFORMED_JSON),
    b'{"text": "\xe9"}': ("", NOT_UTF8),
    b'{"text": "\\ud800"}': ("", NOT_UTF8),
    b'{"text": " \\n"}': ("", EMPTY),
    '{"text": "é"}'.encode(): ("é", None),
}


def test_each_record_stands_for_itself() -> None:
    data = b"\xef\xbb\xbf" + b"\n".join(RECORDS) + b"\n \n"

    pieces = list(record_pieces(io.BytesIO(data), 0, len(data), Reading()))

    assert [(piece.text, piece.problem) for piece in pieces] == list(RECORDS.values())
    assert all(piece.opens and piece.closes for piece in pieces)


def test_the_field_has_the_name_it_is_given() -> None:
    data = b'{"text": "a", "body": "b"}'

    (piece,) = record_pieces(io.BytesIO(data), 0, len(data), Reading(jsonl_field="body"))

    assert piece.text == "b"


def test_a_huge_line_is_passed_over_and_the_next_record_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("axsparse.data.prepare.documents.SKIPPED", 7)
    data = b'{"text": "' + b"x" * 60 + b'"}\n{"text": "y"}\n' + b"z" * 50

    pieces = record_pieces(io.BytesIO(data), 0, len(data), Reading(max_line=30))

    assert [(p.at, p.text, p.problem) for p in pieces] == [
        (0, "", HUGE_LINE),
        (73, "y", None),
        (87, "", HUGE_LINE),
    ]


def test_records_that_begin_behind_the_end_are_of_the_next_stretch() -> None:
    data = b'{"text": "a"}\n{"text": "b"}\n'

    pieces = record_pieces(io.BytesIO(data), 0, 14, Reading())

    assert [piece.text for piece in pieces] == ["a"]

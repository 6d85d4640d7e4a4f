"""Reading documents: formats, encodings, and one line for whatever cannot be read."""

from __future__ import annotations

import io
import logging
import os
import random
import sqlite3
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docx
import pypdf
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rapid.documents import document_from_text, from_docx, from_html, read_document, read_documents, reading
from rapid.documents.text import clean, is_blank
from rapid.errors import DocumentError
from rapid.types import Document

WINDOWS = "L’été “dernier” à la plage — très agréable, €5. Die Straße ist schön."
RUSSIAN = "Москва - столица России. Это большой город на реке. Вопрос: где он стоит?"
JAPANESE = "これは長い文書です。質問に答えてください。カタカナも少しあります。"
CHINESE = "这是一个很长的文件,请回答问题。北京是中国的首都。"


def write(directory: Path, name: str, data: bytes | str) -> Path:
    path = directory / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read(directory: Path, data: bytes | str, name: str = "a.txt") -> str:
    return read_document(write(directory, name, data)).text


def refusal(source) -> str:
    with pytest.raises(DocumentError) as caught:
        read_document(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def pdf_bytes(*pages: bytes) -> bytes:
    """A PDF with these content streams, one a page, written by hand: objects, cross references, trailer."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, content in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(out)


def line(text: str) -> bytes:
    return f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode()


# An image drawn inline (ISO 32000-1, 8.9.7): what a scanner writes has no text operators.
IMAGE = b"q 100 0 0 100 0 0 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \x80 EI Q"


def encrypted_pdf(user_password: str) -> bytes:
    writer = pypdf.PdfWriter(io.BytesIO(pdf_bytes(line("Valve 7 is shut."))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer.encrypt(user_password, "owner", algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def docx_bytes(build) -> bytes:
    document = docx.Document()
    build(document)
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def with_body(xml: str) -> bytes:
    """A docx whose body is this XML."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(docx_bytes(lambda d: None))) as old, zipfile.ZipFile(buffer, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename == "word/document.xml":
                data = (
                    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
                    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">'
                    f"<w:body>{xml}</w:body></w:document>"
                ).encode()
            new.writestr(item, data)
    return buffer.getvalue()


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


# Encodings


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        *((e, f"Grüße, 東京 🦉\n{WINDOWS}") for e in ("utf-8", "utf-8-sig", "utf-16", "utf-32")),
        *((e, "Plain words, one é and one ü.\n") for e in ("utf-16-le", "utf-16-be")),
        ("cp1252", "café"),
        ("cp1252", "naïve"),
        ("cp1252", WINDOWS),
        ("cp1251", RUSSIAN),
        ("koi8_r", RUSSIAN),
        ("cp932", JAPANESE),
        ("euc_jp", JAPANESE),
        ("gb18030", CHINESE),
        ("cp932", f"The title in English, and a long English text around it.\n{JAPANESE}\n" * 20),
    ],
)
def test_encodings(tmp_path, encoding, text):
    assert read(tmp_path, text.encode(encoding)) == text


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_marks_in_both_orders(tmp_path, mark):
    encoding = "utf-16-le" if mark == b"\xff\xfe" else "utf-16-be"
    assert read(tmp_path, mark + "Grüße 🦉".encode(encoding)) == "Grüße 🦉"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\r\nb\rc\nd", "a\nb\nc\nd"),
        (b"old\rMac\r", "old\nMac\n"),
        (b"a\r\r\nb\n\r", "a\n\nb\n\n"),
        (b"The valve\0 is \0red.", "The valve is red."),
        (b"a\r\0\nb", "a\nb"),
        (b"\xef\xbb\xbf\xef\xbb\xbfabc\xef\xbb\xbf", "abc\ufeff"),
        (b"  kept \n\n\n\tas it is  \n", "  kept \n\n\n\tas it is  \n"),
        (b"padded" + bytes(5), "padded"),
        (b"\x1b[1mbold\x1b[0m b\bb", "\x1b[1mbold\x1b[0m b\bb"),
    ],
)
def test_line_ends_and_nuls(tmp_path, data, text):
    assert read(tmp_path, data) == text


def test_a_broken_character_in_utf8_costs_only_itself(tmp_path):
    text = "Größe, Länge, Höhe, Tür, Öl, Übung, Käse. "
    data = text.encode() * 3
    assert read(tmp_path, data + "ü".encode()[:1]) == text * 3 + "\ufffd"


def test_lone_surrogates_do_not_survive(tmp_path):
    assert read(tmp_path, b"\xff\xfe" + "a\ud800b".encode("utf-16-le", "surrogatepass")) == "a\ufffdb"
    assert document_from_text("a\ud800b \ud83e\udd89").text == "a\ufffdb 🦉"
    document = read_document(Document("ab\udfff cd\r\n", "x"))
    assert document == Document("ab\ufffd cd\r\n", "x")
    read(tmp_path, b"\xed\xa0\x80 as some write them " + "äöü".encode() * 20).encode("utf-8")


PLAIN = st.text(st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n\r\t\f"), max_size=80)


def as_read(text: str) -> str:
    """The plain twin of what reading may change in a text without NULs and surrogates."""
    lines = text.lstrip("\ufeff").replace("\r\n", "\n").split("\r")
    return "\n".join(lines)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@given(text=PLAIN)
@example(text="{\\rtf")
@example(text="\ufeff\ufeffx")
def test_any_text_round_trips(encoding, text, tmp_path_factory):
    assume(not is_blank(text))
    data = text.encode(encoding)
    assume(not data.startswith((b"{\\rtf", b"%!PS-", b"%PDF-", b"GIF8", b"MM\0*", b"II*\0")))
    path = tmp_path_factory.getbasetemp() / "round-trip.txt"
    path.write_bytes(data)
    assert read_document(path).text == as_read(text)


@given(st.text(st.characters(codec=None, categories=None), max_size=60))
def test_clean_is_idempotent_and_encodable(text):
    once = clean(text)
    once.encode("utf-8")
    assert clean(once) == once
    assert not {"\r", "\0"} & set(once)


# Binary and other formats


def tar_bytes() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    return buffer.getvalue()


def sqlite_bytes(directory: Path) -> bytes:
    connection = sqlite3.connect(directory / "x.db")
    connection.execute("create table t (words text)")
    connection.commit()
    connection.close()
    return (directory / "x.db").read_bytes()


@pytest.mark.parametrize("name", ["x", "x.txt", "x.md", "x.html", "x.pdf", "x.docx", "x.bin"])
def test_binary_content_is_refused_under_any_name(tmp_path, name):
    noise = random.Random(0)
    contents = [
        noise.randbytes(4096),
        b"\xff\xfe" + noise.randbytes(4096),
        b"\xff\xfe" + noise.randbytes(8191),
        bytes(range(256)) * 4,
        b"\x89PNG\r\n\x1a\n" + noise.randbytes(100),
        b"\x7fELF" + bytes(100),
        bytes(range(128)) * 8,
        sqlite_bytes(tmp_path),
        tar_bytes(),
    ]
    for data in contents:
        message = refusal(write(tmp_path, name, data))
        assert message.startswith(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.doc", "a.XLSX", "a.pptx", "a.epub", "a.odt", "a.rtf", "a.docm"])
def test_other_formats_are_named_with_the_way_out(tmp_path, name):
    message = refusal(write(tmp_path, name, "some words"))
    assert name in message
    assert "not supported" in message
    assert "txt, md, html, pdf, docx" in message


def test_other_formats_are_known_by_content(tmp_path):
    assert "Office" in refusal(write(tmp_path, "a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100)))
    assert "rich text" in refusal(write(tmp_path, "a.txt", "{\\rtf1 words}"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("xl/workbook.xml", "<x/>")
    assert "no docx" in refusal(write(tmp_path, "a", buffer.getvalue()))


# What cannot be opened


def test_missing_file_is_refused_at_once():
    start = time.perf_counter()
    message = refusal("no/such/report.pdf")
    assert time.perf_counter() - start < 0.5
    assert message == "no/such/report.pdf: no such file; check the path"


def test_import_and_refusal_load_no_parser():
    code = (
        "import sys; from rapid.documents import read_document, document_from_text\n"
        "from rapid.errors import DocumentError\n"
        "try: read_document('missing.pdf')\n"
        "except DocumentError: pass\n"
        "document_from_text('words')\n"
        "heavy = {'torch', 'pypdf', 'docx', 'lxml', 'bs4', 'charset_normalizer', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_directory(tmp_path):
    assert "is a directory; name the files in it" in refusal(tmp_path)


def test_no_permission(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt", "words")

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert "no permission" in refusal(path)


def test_odd_paths_give_one_line(tmp_path):
    text = write(tmp_path, "a.txt", "words")
    for source in ("", "a\0b", "x" * 5000, "two\nlines", "lone \udce9", f"{text}/inside"):
        assert len(refusal(source)) < 400


@pytest.mark.parametrize("source", [None, 5, b"bytes", io.BytesIO(b"x")])
def test_other_types_are_refused(source):
    assert "document_from_text" in refusal(source)
    if not isinstance(source, io.BytesIO):
        with pytest.raises(DocumentError):
            read_documents(source)


def test_size_limit_holds_for_files_and_streams(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_BYTES", 2**20)
    path = write(tmp_path, "a.txt", b"a" * 2**20)
    assert len(read_document(path).text) == 2**20
    path.write_bytes(b"a" * (2**20 + 1))
    assert "larger than 1 MiB" in refusal(path)
    monkeypatch.setattr("sys.stdin", Stdin(b"a" * (2**20 + 1)))
    assert "larger than 1 MiB" in refusal("-")
    if os.path.exists("/dev/zero"):
        assert "larger than 1 MiB" in refusal("/dev/zero")


# Case B35: blank and short documents


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a"])
@pytest.mark.parametrize("text", ["", " \n\t ", "\ufeff", "\u200b\u00a0\n", "\0\0"])
def test_blank_documents_are_refused_everywhere(tmp_path, monkeypatch, name, text):
    assert "is empty" in refusal(write(tmp_path, name, text))
    assert "is empty" in refusal(Document(text, "blank"))
    monkeypatch.setattr("sys.stdin", Stdin(text.encode()))
    assert refusal("-").startswith("stdin: is empty")
    with pytest.raises(DocumentError, match=r"^blank: is empty"):
        document_from_text(text, "blank")


def test_blank_in_other_formats(tmp_path):
    assert "is empty" in refusal(write(tmp_path, "a.pdf", b""))
    assert "is empty" in refusal(write(tmp_path, "a.docx", docx_bytes(lambda d: d.add_paragraph("  "))))
    assert "is empty" in refusal(write(tmp_path, "a.html", "<html><script>x = 1</script></html>"))


def test_short_document_is_kept_whole(tmp_path, monkeypatch):
    assert read(tmp_path, "Ok.") == "Ok."
    assert document_from_text("Ok.").text == "Ok."
    monkeypatch.setattr("sys.stdin", Stdin(b"Ok."))
    assert read_document("-") == Document("Ok.", "stdin")


# PDF


def test_pdf_pages_in_order(tmp_path):
    data = pdf_bytes(line("Valve 7 is shut."), line("Pump 3 is on."))
    assert read(tmp_path, data, "a.pdf") == "Valve 7 is shut.\n\nPump 3 is on."


def test_pdf_is_known_by_content(tmp_path, monkeypatch):
    data = pdf_bytes(line("Words."))
    assert read(tmp_path, data, "a.txt") == read(tmp_path, data, "a") == "Words."
    assert read(tmp_path, b"junk before\n" + data, "a.pdf") == "Words."
    monkeypatch.setattr("sys.stdin", Stdin(data))
    assert read_document("-").text == "Words."


def test_image_only_pdf(tmp_path):
    message = refusal(write(tmp_path, "scan.pdf", pdf_bytes(IMAGE, IMAGE)))
    assert "scan.pdf: has no text layer; run OCR first" in message
    assert "no text layer" in refusal(write(tmp_path, "none.pdf", pdf_bytes()))


def test_encrypted_pdf(tmp_path):
    assert read(tmp_path, encrypted_pdf(""), "a.pdf") == "Valve 7 is shut."
    message = refusal(write(tmp_path, "b.pdf", encrypted_pdf("secret")))
    assert "b.pdf: is encrypted" in message


@pytest.mark.parametrize(
    "data",
    [b"%PDF-1.4\nnothing of the kind", b"%PDF-1.4", b"words", pdf_bytes(line("x"))[:60], b"%PDF-1.4\n" + bytes(500)],
)
def test_damaged_pdf(tmp_path, data):
    assert "a.pdf: is damaged" in refusal(write(tmp_path, "a.pdf", data))


def test_pdf_complaints_stay_inside(tmp_path, caplog, capfd):
    # A cross reference table that lies: pypdf warns and rebuilds it.
    data = pdf_bytes(line("Words.")).replace(b"startxref\n", b"startxref\n9")
    path = write(tmp_path, "a.pdf", data)
    logger = logging.getLogger("pypdf")
    level = logger.level
    assert read_document(path).text == "Words."
    assert (caplog.records, capfd.readouterr().err, logger.level) == ([], "", level)
    pypdf.PdfReader(path)
    assert caplog.records  # the same file does make pypdf complain, and it is heard again afterwards


def test_pdfs_read_in_parallel_leave_the_logger_as_it_was(tmp_path):
    paths = [write(tmp_path, f"{i}.pdf", pdf_bytes(line(f"Number {i}."))) for i in range(8)]
    logger = logging.getLogger("pypdf")
    level = logger.level
    with ThreadPoolExecutor(8) as pool:
        documents = list(pool.map(read_document, paths))
    assert [d.text for d in documents] == [f"Number {i}." for i in range(8)]
    assert logger.level == level


# DOCX


def test_docx_paragraphs_and_tables_in_order(tmp_path):
    def build(document):
        document.add_heading("Pumps", 1)
        document.add_paragraph("First.\tTabbed")
        table = document.add_table(2, 2)
        for cell, text in zip(table._cells, ["Pump", "State", "3", "on"], strict=True):
            cell.text = text
        document.add_paragraph("Last.")

    text = read(tmp_path, docx_bytes(build), "a.docx")
    assert text == "Pumps\n\nFirst.\tTabbed\n\nPump | State\n3 | on\n\nLast."


def test_docx_is_known_by_content(tmp_path, monkeypatch):
    data = docx_bytes(lambda d: d.add_paragraph("Words."))
    assert read(tmp_path, data, "a") == "Words."
    monkeypatch.setattr("sys.stdin", Stdin(data))
    assert read_document("-").text == "Words."


@pytest.mark.parametrize(
    ("xml", "text"),
    [
        ("<w:sdt><w:sdtContent><w:p><w:r><w:t>in a control</w:t></w:r></w:p></w:sdtContent></w:sdt>", "in a control"),
        ("<w:p><w:ins><w:r><w:t>new</w:t></w:r></w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del></w:p>",
         "new"),
        ("<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:t>a</w:t><w:br/><w:t>b</w:t></w:r></w:p>", "a\nb"),
        ("<w:p><w:hyperlink><w:r><w:t>link</w:t></w:r></w:hyperlink></w:p>", "link"),
        ("<w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc><w:tc>"
         "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>c</w:t></w:r></w:p></w:tc></w:tr></w:tbl></w:tc></w:tr></w:tbl>",
         "a b | c"),
        ("<w:p><w:r><mc:AlternateContent><mc:Choice><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Choice><mc:Fallback>"
         "<w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent></w:r></w:p>", "\nbox\n"),
    ],
)  # fmt: skip
def test_docx_text_that_paragraph_objects_lose(tmp_path, xml, text):
    assert read(tmp_path, with_body(xml), "a.docx") == text


def test_damaged_docx(tmp_path):
    good = docx_bytes(lambda d: d.add_paragraph("Words."))
    entry = good.index(b"PK\x01\x02")
    future_zip = good[: entry + 6] + b"\xff" + good[entry + 7 :]  # "version needed to extract" 25.5
    for data in (b"words", good[:200], good[: len(good) // 2], b"PK\x03\x04" + bytes(100), future_zip):
        assert "damaged" in refusal(write(tmp_path, "a.docx", data))
    assert "damaged" in refusal(write(tmp_path, "a.docx", with_body("<w:p>")))
    assert read(tmp_path, good, "a.docx") == "Words."


def test_docx_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(from_docx, "MAX_UNPACKED_BYTES", 2**20)
    data = docx_bytes(lambda d: d.add_paragraph("a" * 2**21))
    assert len(data) < 2**20
    assert "unpacks to more than 1 MiB" in refusal(write(tmp_path, "a.docx", data))


# HTML


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>one</p><p>two <b>bold</b>ly</p>", "one\n\ntwo boldly"),
        ("<div>one</div><div>two<br>three<br><br>four</div>", "one\ntwo\nthree\n\nfour"),
        ("<ul><li>a<li>b</ul>after", "a\nb\n\nafter"),
        ("<p>fish &amp; chips &lt;b&gt; &eacute;&#8364;&nbsp;x</p>", "fish & chips <b> é€\xa0x"),
        ("<p>  much \n\n space\t here </p>", "much space here"),
        ("<html><head><title>The title</title><meta content=no></head><body>Text</body></html>", "The title\n\nText"),
        ("a<script>var x = '<p>no</p>'</script><style>p {}</style><noscript>no</noscript>b", "ab"),
        ("a<template><p>no</p></template><!-- no -->b", "ab"),
        ("<pre>\n  def f():\n      return 1\n</pre>done", "  def f():\n      return 1\n\ndone"),
        ("<pre>a\n<b>b</b>\n\n\nc</pre>", "a\nb\n\n\nc"),
        ("<table><tr><th>Pump<th>State<tr><td>3<td>on</table>", "Pump | State\n3 | on"),
        ("<table><tr><td><p>a</p></td><td><p>b</p><p>c</p></td></tr></table>d", "a | b\n\nc\n\nd"),
        ("<table><tr><td>a</td><td></td><td>c</td></tr><tr><td></td><td>y</td></tr></table>", "a |  | c\n| y"),
        ("<p>lone &#xD800; and &#0; here", "lone \ufffd and \ufffd here"),
    ],
)
def test_html(tmp_path, html, text):
    assert read(tmp_path, html, "a.html") == text


def test_html_encodings(tmp_path):
    page = "<html><head><meta charset={}></head><body>Größe: {}</body></html>"
    assert read(tmp_path, page.format("utf-8", "東京").encode(), "a.htm") == "Größe: 東京"
    assert read(tmp_path, page.format("iso-8859-1", "“x” €").encode("cp1252"), "a.htm") == "Größe: “x” €"
    assert read(tmp_path, page.format("iso-8859-2", "Zażółć").encode("iso-8859-2"), "a.htm") == "Größe: Zażółć"
    assert read(tmp_path, page.format("utf-8", "naïve").encode("cp1252"), "a.htm") == "Größe: naïve"
    assert read(tmp_path, page.format("no-such", "naïve").encode("cp1252"), "a.htm") == "Größe: naïve"
    assert read(tmp_path, page.format("utf-16", "naïve").encode("cp1252"), "a.htm") == "Größe: naïve"
    assert read(tmp_path, page.format("utf-8", "naïve").encode("utf-16"), "a.htm") == "Größe: naïve"


@pytest.mark.parametrize("start", ["<!DOCTYPE html>", "<HTML>", "\n <!-- x -->\n<html>", '<?xml version="1.0"?><html>'])
def test_html_is_known_by_its_start_except_in_text_files(tmp_path, monkeypatch, start):
    page = f"{start}<p>Words</p>"
    for data in (page.encode(), page.encode("utf-16"), page.encode("utf-8-sig")):
        assert read(tmp_path, data, "page") == "Words"
        monkeypatch.setattr("sys.stdin", Stdin(data))
        assert read_document("-").text == "Words"
    assert read(tmp_path, page, "a.md") == page
    assert read(tmp_path, f"see {page}", "page") == f"see {page}"


def test_deeply_nested_and_broken_html_is_read(tmp_path):
    assert read(tmp_path, "<div>" * 5000 + "deep", "a.html") == "deep"
    assert "Words" in read(tmp_path, "<p>Words</b></i><table><p <q>", "a.html")
    refusal(write(tmp_path, "b.html", "<![foo[ x"))


def test_large_html_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(from_html, "MAX_MARKUP_BYTES", 2**20)
    assert "HTML of more than 1 MiB" in refusal(write(tmp_path, "a.html", "<p>x" * 2**18 + "y"))


# Several documents, names


def test_several_documents_keep_order_and_names(tmp_path, monkeypatch):
    first, second = write(tmp_path, "b.txt", "Second letter."), write(tmp_path, "a.md", "# First letter")
    memory = Document("In memory.\r\n", "note")
    monkeypatch.setattr("sys.stdin", Stdin(b"Piped."))
    documents = read_documents([first, "-", memory, str(second), first])
    assert [d.text for d in documents] == [
        "Second letter.",
        "Piped.",
        "In memory.\r\n",
        "# First letter",
        "Second letter.",
    ]
    assert [d.name for d in documents] == [str(first), "stdin", "note", str(second), str(first)]
    assert documents[2] is memory


def test_one_source_is_a_list_of_one(tmp_path):
    path = write(tmp_path, "a.txt", "Words.")
    assert read_documents(str(path)) == read_documents(path) == [Document("Words.", str(path))]
    assert read_documents(Document("x")) == [Document("x")]


def test_names_can_be_given(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt", "Words.")
    assert read_document(path, name="report").name == "report"
    assert read_document(Document("x", "y"), name="z") == Document("x", "z")
    monkeypatch.setattr("sys.stdin", Stdin(b"Words."))
    assert read_document("-", name="mail").name == "mail"


def test_no_documents_and_stdin_twice():
    with pytest.raises(DocumentError, match="no document given"):
        read_documents([])
    with pytest.raises(DocumentError, match="more than once"):
        read_documents(["-", "-"])


@pytest.mark.parametrize("stdin", [None, io.StringIO("no buffer")])
def test_unreadable_stdin(monkeypatch, stdin):
    monkeypatch.setattr("sys.stdin", stdin)
    assert "standard input cannot be read" in refusal("-")


def test_a_str_is_never_taken_for_a_text():
    assert "no such file" in refusal("The pump is on.")
    with pytest.raises(DocumentError, match="must be a str"):
        document_from_text(b"bytes")  # type: ignore[arg-type]

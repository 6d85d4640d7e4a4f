"""Bytes to text: encodings, line ends, and what tells text from binary content.

Knows no file and no format; a `ValueError` says that the bytes are no text.
"""

from __future__ import annotations

import codecs
import re

_SURROGATE = re.compile("[\ud800-\udfff]")
# Control characters that plain text does not use; tab, line and page ends, backspace and escape are spared.
_CONTROL_BYTES = bytes(b for b in (*range(1, 32), 127) if b not in b"\t\n\v\f\r\b\x1b")
# In Western text bytes above 127 stand alone between ASCII letters; in any other script they form runs.
_HIGH_RUN = re.compile(rb"[\x80-\xff]{3,}")
_ASCII = bytes(range(128))
_SAMPLE_BYTES = 1 << 16
# What a plain text of before UTF-8 may be in. The detector guesses better when it is not offered curiosities.
_LEGACY = [
    *("cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
# Labels that the web uses for a larger code page (WHATWG Encoding Standard, "names and labels").
_WEB_NAMES = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}


def clean(text: str) -> str:
    """The text as a `Document` holds it; applying it twice changes nothing more.

    NULs and leading byte order marks are removed, CRLF and CR become LF, surrogate pairs are joined and lone
    surrogates become U+FFFD.
    """
    text = text.replace("\0", "").lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    # The search is far cheaper than the round trip, and almost every text ends here.
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for each surrogate: offsets hold."""
    return _SURROGATE.sub("\ufffd", text)


def is_blank(text: str) -> bool:
    """True where nothing in the text can be seen: spaces, control and format characters only."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def decode(data: bytes, declared: str | None = None) -> str:
    """The text of `data`, not yet cleaned.

    In this order: a byte order mark; UTF-16 without one, where zeros fill every other place; UTF-8; the
    `declared` encoding; UTF-8 with a few broken characters (they become U+FFFD); Windows-1252; what
    charset-normalizer finds.

    Raises:
        ValueError: the bytes are no text, or in no encoding that could be told.
    """
    wide = _decode_wide(data)
    if wide is not None:
        return wide
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        _check_binary(data, most_control=0.02)
        return _decode_declared(data, declared) or _decode_damaged_utf8(data) or _decode_legacy(data)
    _check_binary(data, most_control=0.1)
    return text


def _check_binary(data: bytes, most_control: float) -> None:
    size = len(data)
    control = size - len(data.translate(None, _CONTROL_BYTES))
    # Half of it: zeros as padding or as separators of fields are no reason to refuse a text.
    if control > most_control * size or data.count(0) * 2 > size:
        raise ValueError("binary content")


def _decode_wide(data: bytes) -> str | None:
    """UTF-16 or UTF-32, or None where the bytes are neither."""
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        try:
            return data.decode("utf-32")
        except UnicodeDecodeError:
            # The mark of UTF-32-LE is also that of UTF-16-LE followed by a NUL.
            if data.startswith(codecs.BOM_UTF32_BE):
                raise ValueError("damaged UTF-32") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _decode_mostly(data, "utf-16")
    even, odd = data[:_SAMPLE_BYTES:2], data[1:_SAMPLE_BYTES:2]
    for filled, other, encoding in ((odd, even, "utf-16-le"), (even, odd, "utf-16-be")):
        if filled.count(0) * 10 >= len(filled) * 7 and other.count(0) * 20 <= len(other) and len(other):
            try:
                text = data.decode(encoding)
            except UnicodeDecodeError:
                return None
            _check_binary(text.encode("utf-8"), most_control=0.1)
            return text
    return None


def _decode_mostly(data: bytes, encoding: str) -> str:
    """Decodes a text that may be damaged in a few places: 1 of 100 characters, at least one."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        text = data.decode(encoding, "replace")
    # Random bytes fail more often: as UTF-16, about 3 of 100 units are lone surrogates.
    if text.count("\ufffd") > 1 + len(text) // 100:
        raise ValueError("binary content or an unknown encoding")
    return text


def _decode_declared(data: bytes, declared: str | None) -> str | None:
    if declared is None:
        return None
    try:
        name = codecs.lookup(declared).name
        # A declaration that could be read byte by byte is not in UTF-16, whatever it says.
        if name.startswith(("utf-16", "utf-32")):
            return None
        return data.decode(_WEB_NAMES.get(name, name))
    except (LookupError, ValueError):
        return None


def _decode_damaged_utf8(data: bytes) -> str | None:
    text = data.decode("utf-8", "replace")
    damage = text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
    intact = len(text) - len(text.encode("ascii", "ignore")) - damage
    return text if damage * 10 <= intact else None


def _decode_legacy(data: bytes) -> str:
    """An 8-bit or East Asian encoding; Western European where nothing speaks against it."""
    high = len(data.translate(None, _ASCII))
    if sum(map(len, _HIGH_RUN.findall(data))) * 4 < high:
        try:
            return data.decode("cp1252")
        except UnicodeDecodeError:
            pass
    from charset_normalizer import from_bytes

    best = from_bytes(_sample(data), cp_isolation=_LEGACY).best()
    if best is None:
        raise ValueError("binary content or an unknown encoding")
    return _decode_mostly(data, best.encoding)


def _sample(data: bytes) -> bytes:
    """The first lines with bytes above 127: whole lines, since a cut inside one may split a character."""
    lines, size = [], 0
    for line in data.splitlines(keepends=True):
        if not line.isascii():
            lines.append(line)
            size += len(line)
            if size >= _SAMPLE_BYTES:
                break
    return b"".join(lines)

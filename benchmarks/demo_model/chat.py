"""Synthetic conversations that teach the demo model its chat format: short questions with answers it can really give.

Definitions and example sentences come from WordNet, verses from the King James Bible; everything else is made up here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.demo_model.corpus import Document, wordnet_glosses
from benchmarks.demo_model.fables import ANIMALS, COLORS, NAMES, PLACES, THINGS, fable
from benchmarks.demo_model.recall import ADJECTIVES, CODE_DIGITS, NOUNS
from benchmarks.demo_model.tokenizer import ChatRenderer

CITIES = [
    "London",
    "Paris",
    "Rome",
    "Boston",
    "Berlin",
    "Vienna",
    "Athens",
    "Dublin",
    "Oslo",
    "Madrid",
    "Lisbon",
    "Cairo",
    "Lima",
]
SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You are a friendly assistant who answers in plain words.")

Turn = tuple[str, str]  # user, assistant


@dataclass
class ChatData:
    """Draws conversations. `rng` decides everything, so equal seeds give equal data."""

    rng: np.random.Generator
    definitions: list[tuple[str, str, str]]  # part of speech, word, definition
    examples: list[tuple[str, str]]  # word, sentence
    synonyms: list[tuple[str, str]]
    verses: list[tuple[str, str]]  # citation, text

    @staticmethod
    def build(rng: np.random.Generator, wordnet: Path, documents: list[Document], verses: list[tuple[str, str]]) -> ChatData:
        """Keep the words that the books use at least 30 times and what WordNet says first about them."""
        prose = " ".join(d.text for d in documents if d.source in ("austen", "melville", "world-english-bible", "jargon-file"))
        counts: dict[str, int] = {}
        for word in re.findall(r"[a-z]+", prose.lower()):
            counts[word] = counts.get(word, 0) + 1
        seen: set[str] = set()
        definitions, examples, synonyms = [], [], []
        for part, definition, words, sentences in wordnet_glosses(wordnet):
            common = [w for w in words if counts.get(w, 0) >= 30 and len(w) > 3]
            for word in common:
                if word not in seen and part in ("noun", "verb", "adj") and 15 < len(definition) < 90 and "(" not in definition:
                    seen.add(word)
                    definitions.append((part, word, definition.split(";")[0]))
                for sentence in sentences:
                    if re.search(rf"\b{word}\b", sentence) and 20 < len(sentence) < 80:
                        examples.append((word, sentence[0].upper() + sentence[1:].rstrip(".?!;, ") + "."))
            if len(common) >= 2:
                synonyms.append((common[0], common[1]))
        short = [(citation, text) for citation, text in verses if 30 < len(text) < 160]
        return ChatData(rng, definitions, examples, synonyms, short)

    def pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def conversation(self, render: ChatRenderer) -> str:
        """One rendered conversation of one to four turns, some with a system prompt, thinking, or a tool call."""
        kind = self.rng.random()
        if kind < 0.06:
            return self._tool_call(render)
        if kind < 0.14:
            return self._thinking(render)
        messages: list[dict[str, Any]] = []
        if self.rng.random() < 0.3:
            messages.append({"role": "system", "content": self.pick(SYSTEM)})
        for _ in range(int(self.rng.integers(1, 5))):
            question, answer = self._turn()
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return render(messages)

    def _turn(self) -> Turn:
        makers: list[tuple[float, Callable[[], Turn]]] = [
            (0.08, self._greeting),
            (0.22, self._definition),
            (0.10, self._example),
            (0.05, self._synonym),
            (0.08, self._sum),
            (0.05, self._count),
            (0.08, self._repeat),
            (0.08, self._belonging),
            (0.14, self._story),
            (0.08, self._verse),
            (0.04, self._json),
            (0.08, self._recall),
        ]
        weights = np.array([w for w, _ in makers])
        return makers[int(self.rng.choice(len(makers), p=weights / weights.sum()))][1]()

    def _greeting(self) -> Turn:
        name = self.pick(NAMES)
        return self.pick(
            [
                ("Hello!", "Hello! How can I help you today?"),
                ("Hi.", "Hello! What would you like to talk about?"),
                ("Good morning.", "Good morning! How can I help you?"),
                ("How are you?", "I am well, thank you. How are you?"),
                (
                    "Who are you?",
                    "I am a small demonstration model. I was trained on old books, so please do not expect too much of me.",
                ),
                ("What are you?", "I am a very small language model, made to show that this engine works."),
                ("What can you do?", "I can explain a word, tell a short story, quote a verse, or add two small numbers."),
                ("Thank you.", "You are welcome!"),
                ("Thanks!", "You are welcome. Is there anything else?"),
                ("Goodbye.", "Goodbye, and take care!"),
                (f"Hello, I am {name}.", f"Hello, {name}! How can I help you today?"),
                (f"My name is {name}. What is my name?", f"Your name is {name}."),
            ]
        )

    def _definition(self) -> Turn:
        part, word, meaning = self.pick(self.definitions)
        article = "An" if word[0] in "aeiou" else "A"
        if part == "noun" and re.match(r"(an?|the|any|some)\b", meaning):
            forms = (
                f"What is {article.lower()} {word}?",
                f"What does {word} mean?",
                f"Define {word}.",
                f"Explain the word {word}.",
            )
            return self.pick(forms), f"{article} {word} is {meaning}."
        if part == "verb":
            return self.pick((f"What does it mean to {word}?", f"Define the verb {word}.")), f"To {word} is to {meaning}."
        return self.pick((f"What does {word} mean?", f"Define {word}.")), f"The word {word} means: {meaning}."

    def _example(self) -> Turn:
        word, sentence = self.pick(self.examples)
        return self.pick((f"Use the word {word} in a sentence.", f"Give me a sentence with {word}.")), sentence

    def _synonym(self) -> Turn:
        word, other = self.pick(self.synonyms)
        return f"Give me another word for {word}.", f"Another word for {word} is {other}."

    def _sum(self) -> Turn:
        a, b = (int(x) for x in self.rng.integers(0, 11, 2))
        return self.pick((f"What is {a} plus {b}?", f"How much is {a} and {b}?")), f"{a} plus {b} is {a + b}."

    def _count(self) -> Turn:
        start = int(self.rng.integers(0, 15))
        stop = start + int(self.rng.integers(2, 9))
        return f"Count from {start} to {stop}.", ", ".join(map(str, range(start, stop + 1))) + "."

    def _repeat(self) -> Turn:
        sentence = self.pick(self.examples)[1]
        return self.pick((f"Repeat after me: {sentence}", f"Please repeat this: {sentence}")), sentence

    def _belonging(self) -> Turn:
        name, thing, color = self.pick(NAMES), self.pick(THINGS), self.pick(COLORS)
        other, place = self.pick(NAMES), self.pick(PLACES)
        return self.pick(
            [
                (f"{name} has a {color} {thing}. What color is the {thing}?", f"The {thing} is {color}."),
                (f"{name} lost a {thing} near the {place}. Where is the {thing}?", f"The {thing} is near the {place}."),
                (f"{name} gave a {color} {thing} to {other}. Who has the {thing} now?", f"{other} has the {thing} now."),
                (f"{name} is at the {place} and {other} is at home. Where is {name}?", f"{name} is at the {place}."),
            ]
        )

    def _story(self) -> Turn:
        hero, friend = (ANIMALS[i] for i in self.rng.choice(len(ANIMALS), 2, replace=False))
        thing, article = self.pick(THINGS), "an" if hero[0] in "aeiou" else "a"
        form = int(self.rng.integers(4))
        if form == 0:
            return f"Tell me a story about {article} {hero} and a {friend}.", fable(self.rng, hero=hero, friend=friend)
        if form == 1:
            return f"Tell me a short story about {article} {hero}.", fable(self.rng, hero=hero)
        if form == 2:
            return f"Write a story about {article} {hero} and a {thing}.", fable(self.rng, hero=hero, thing=thing)
        return self.pick(("Tell me a story.", "Write a fable.")), fable(self.rng)

    def _verse(self) -> Turn:
        citation, text = self.pick(self.verses)
        book = citation.rpartition(" ")[0]
        return self.pick(
            (f"Quote a verse from {book}.", f"Give me a verse of {book}.", "Quote a verse.")
        ), f"{text} ({citation})"

    def _json(self) -> Turn:
        name, city, age = self.pick(NAMES), self.pick(CITIES), int(self.rng.integers(5, 95))
        record = json.dumps({"name": name, "age": age, "city": city})
        return f"{name} is {age} years old and lives in {city}. Answer as JSON with name, age and city.", record

    def _recall(self) -> Turn:
        facts = []
        for noun in self.rng.choice(len(NOUNS), int(self.rng.integers(1, 7)), replace=False):
            code = "".join(map(str, self.rng.integers(10, size=CODE_DIGITS)))
            facts.append((f"The code of the {self.pick(ADJECTIVES)} {NOUNS[noun]} is", code))
        asked, code = self.pick(facts)
        question = asked.replace("The code", "What is the code").removesuffix(" is") + "?"
        return " ".join(f"{name} {number}." for name, number in facts) + " " + question, f"{asked} {code}."

    def _thinking(self, render: ChatRenderer) -> str:
        question, answer = self.pick((self._sum, self._belonging, self._definition, self._synonym))()
        thought = self.pick((f'The question is: "{question}" I know this.', f'I am asked: "{question}" Let me answer plainly.'))
        prompt = render([{"role": "user", "content": question}], add_generation_prompt=True, thinking=True)
        return f"{prompt}{thought}</think>{answer}{render.eos}"

    def _tool_call(self, render: ChatRenderer) -> str:
        city = self.pick(CITIES)
        tools = {
            "get_weather": ("Weather of a city", "city", f"What is the weather in {city}?", city),
            "get_time": ("Local time of a city", "city", f"What time is it in {city}?", city),
            "look_up": ("Meaning of a word", "word", "", self.pick(self.definitions)[1]),
        }
        names = list(tools)[: int(self.rng.integers(1, 4))]
        self.rng.shuffle(names)
        name = self.pick(names)
        _, argument, question, value = tools[name]
        question = question or f"Look up the word {value}."
        listed = [
            {
                "type": "function",
                "function": {
                    "name": n,
                    "description": tools[n][0],
                    "parameters": {
                        "type": "object",
                        "properties": {tools[n][1]: {"type": "string"}},
                        "required": [tools[n][1]],
                    },
                },
            }
            for n in names
        ]
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps({argument: value})}}
        result, answer = {
            "get_weather": ("sunny, 21 degrees", f"The weather in {city} is sunny, with 21 degrees."),
            "get_time": ("14:05", f"It is 14:05 in {city}."),
            "look_up": ("a common word", f"The word {value} is a common word."),
        }[name]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        if self.rng.random() < 0.5:
            messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": answer}]
        return render(messages, tools=listed)

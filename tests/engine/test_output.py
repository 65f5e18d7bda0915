"""OutputStream: stop strings over token borders, trimming at one token, logprob strings, endings."""

from __future__ import annotations

import itertools

import pytest

from engine.errors import RequestRejected
from engine.hub import resolve_model
from engine.messages import TokenOutput
from engine.output import OutputDelta, OutputStream
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.engine.fake_engine import scored

TOKENIZER = Tokenizer.load(resolve_model("demo"))


def letters(text: str) -> list[int]:
    """One token per UTF-8 byte, so that every border is possible."""
    single = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    return [single[bytes([value])] for value in text.encode()]


def run(
    ids: list[int], params: SamplingParams, sizes: list[int] | None = None, reason: str = "length"
) -> tuple[list[OutputDelta], OutputStream]:
    """Push ids in groups of the given sizes (all single by default); the last group ends the request."""
    stream = OutputStream(TOKENIZER, params, [1, 2, 3])
    sizes = sizes or [1] * len(ids)
    starts = list(itertools.accumulate([0, *sizes]))
    deltas = []
    for start, end in itertools.pairwise(starts):
        logprobs = [scored(token) for token in ids[start:end]] if params.logprobs is not None else None
        output = TokenOutput("r", ids[start:end], finish_reason=reason if end == len(ids) else None, logprobs=logprobs)
        deltas.append(stream.push(output))
    return deltas, stream


def test_stop_string_over_tokens_is_never_shown() -> None:
    """Reports T04, T07: seven letters over seven tokens; nothing of the match leaks, no empty deltas are delivered."""
    deltas, stream = run(letters("say STOPNOW and more"), SamplingParams(stop=["STOPNOW"]))
    assert "".join(delta.text for delta in deltas) == stream.text == "say "
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "STOPNOW")
    assert all(delta.text or delta.finish_reason for delta in deltas if delta)
    assert [delta.stopped_by_string for delta in deltas if delta.finish_reason] == [True]


def test_a_refuted_beginning_is_released() -> None:
    """Report T04: text that only looked like a stop string comes out whole and in order."""
    deltas, stream = run(letters("STOPNOT STOPNO"), SamplingParams(stop=["STOPNOW"]))
    assert "".join(delta.text for delta in deltas) == stream.text == "STOPNOT STOPNO"
    assert stream.finish_reason == "length"


@pytest.mark.parametrize("include", [False, True])
def test_text_ids_logprobs_and_usage_end_with_the_same_token(include: bool) -> None:
    """A stop in the middle of a group of tokens (as drafts make them) drops the rest of the group everywhere."""
    ids = letters("ab##cdef")
    params = SamplingParams(stop=["##"], logprobs=1, include_stop_str_in_output=include)
    for sizes in ([8], [1, 7], [3, 5], [4, 4], [2, 2, 4]):
        _, stream = run(ids, params, sizes)
        assert stream.text == ("ab##" if include else "ab")
        assert stream.token_ids == ids[:4] and stream.num_output_tokens == 4
        assert stream.logprobs is not None and [entry.token_id for entry in stream.logprobs] == ids[:4]
        assert stream.stop_reason == "##"


@pytest.mark.parametrize("stop", [["ab", "abc"], ["bc", "ab"], ["aab", "ab"], ["c", "cde"], ["xyz"], ["de", "cdef"]])
def test_every_cut_gives_the_same_text(stop: list[str]) -> None:
    """Report T05: the outcome depends on the text alone, not on how tokens and steps cut it."""
    ids = letters("xaabcdef")
    outcomes = set()
    for cuts in itertools.product([False, True], repeat=len(ids) - 1):
        borders = [0, *[i + 1 for i, cut in enumerate(cuts) if cut], len(ids)]
        deltas, stream = run(ids, SamplingParams(stop=stop), [b - a for a, b in itertools.pairwise(borders)])
        assert "".join(delta.text for delta in deltas) == stream.text
        outcomes.add((stream.text, stream.finish_reason, stream.stop_reason))
    assert len(outcomes) == 1


def test_min_tokens_counts_for_stop_strings_too() -> None:
    ids = letters("..x..y..")
    assert run(ids, SamplingParams(stop=[".."], min_tokens=2))[1].text == ""
    assert run(ids, SamplingParams(stop=[".."], min_tokens=3))[1].text == "..x"
    assert run(ids, SamplingParams(stop=[".."], min_tokens=6))[1].text == "..x..y"
    assert run(letters("a..."), SamplingParams(stop=[".."], min_tokens=4))[1].text == "a."


def test_end_token_is_counted_but_not_shown() -> None:
    """Report T14: the end-of-sequence token reaches ids and usage, never the text."""
    eos = TOKENIZER.eos_token_id
    assert eos is not None
    for skip in (True, False):
        params = SamplingParams(logprobs=0, skip_special_tokens=skip)
        _, stream = run([*letters("ok"), eos], params, reason="stop")
        assert stream.text == "ok" and stream.token_ids[-1] == eos and stream.num_output_tokens == 3
        assert stream.logprobs is not None and stream.logprobs[-1].text == ""
    _, stream = run(letters("ok!"), SamplingParams(include_stop_str_in_output=True), reason="stop")
    assert stream.text == "ok!"


def test_held_text_and_broken_characters_drain_at_the_end() -> None:
    """Report T03: what was held for a stop string or an incomplete character comes with the last delta."""
    ids = letters("a🎉")[:-1]
    deltas, stream = run(ids, SamplingParams(stop=["a🎉b"], logprobs=0))
    assert stream.text == "a\ufffd" == "".join(delta.text for delta in deltas)
    assert stream.logprobs is not None and "".join(entry.text for entry in stream.logprobs) == "a\ufffd"


def test_token_texts_join_to_the_text() -> None:
    """Report A05: also where a character lies over several tokens; each token alone is shown by its bytes."""
    _, stream = run(letters("né🎉"), SamplingParams(logprobs=1))
    assert stream.logprobs is not None
    assert "".join(entry.text for entry in stream.logprobs) == "né🎉"
    assert stream.logprobs[1].token == "bytes:\\xc3" and stream.logprobs[1].raw == b"\xc3"


def test_tokens_come_with_their_text_or_at_once() -> None:
    ids = letters("🎉x")
    deltas, _ = run(ids, SamplingParams())
    assert [delta.token_ids for delta in deltas if delta] == [ids[:4], ids[4:]]
    stream = OutputStream(TOKENIZER, SamplingParams(), [1], tokens_with_text=False)
    assert [stream.push(TokenOutput("r", [token])).token_ids for token in ids] == [[token] for token in ids]


def test_kept_special_tokens_stay_visible() -> None:
    """Report T06: a parser's marks pass although special tokens are hidden, and never in halves."""
    mark = TOKENIZER.control_tokens["<｜tool▁call▁begin｜>"]
    hidden, shown = (
        OutputStream(TOKENIZER, SamplingParams(), [1]),
        OutputStream(TOKENIZER, SamplingParams(), [1], keep=frozenset([mark])),
    )
    assert hidden.push(TokenOutput("r", [mark])).text == ""
    assert shown.push(TokenOutput("r", [mark])).text == "<｜tool▁call▁begin｜>"


def test_a_bad_id_fails_its_request_only() -> None:
    """Report T13."""
    bad, good = (OutputStream(TOKENIZER, SamplingParams(), [1]) for _ in range(2))
    with pytest.raises(RequestRejected):
        bad.push(TokenOutput("bad", [10**9]))
    assert good.push(TokenOutput("good", letters("x"))).text == "x"


def test_outputs_after_the_end_change_nothing() -> None:
    _, stream = run(letters("a#b"), SamplingParams(stop=["#"]))
    assert not stream.push(TokenOutput("r", letters("zzz"), finish_reason="abort"))
    assert (stream.text, stream.finish_reason, stream.num_output_tokens) == ("a", "stop", 2)


def test_prompt_logprobs_carry_the_prompts_text() -> None:
    stream = OutputStream(TOKENIZER, SamplingParams(prompt_logprobs=1), letters("hé"))
    first = [None, *(scored(token) for token in letters("hé")[1:])]
    delta = stream.push(TokenOutput("r", letters("x"), prompt_logprobs=first))
    assert delta.prompt_logprobs is not None and delta.prompt_logprobs[0] is None
    assert [entry.text for entry in delta.prompt_logprobs if entry] == ["", "é"]
    assert "".join(stream.prompt_pieces()) == "hé"

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppcore.messages import (
    WORDS,
    Bye,
    Call,
    Done,
    Failed,
    Held,
    Key,
    Message,
    Never,
    Probe,
    Pull,
    Pulls,
    Release,
    Reply,
    Worker,
    parse,
    spell,
)

numbers = st.integers(0, 1 << 53)
texts = st.text(max_size=30)
workers = st.builds(Worker, texts, texts)
keys = st.builds(Key, workers, st.integers(-1, 1 << 40))
MESSAGES: dict[type, st.SearchStrategy[Message]] = {
    Pull: st.builds(Pull, numbers, keys, texts, texts),
    Pulls: st.builds(
        Pulls, st.lists(st.builds(Pull, numbers, keys, texts, texts), max_size=3).map(tuple)
    ),
    Probe: st.builds(Probe, numbers, texts),
    Call: st.builds(Call, keys, texts, texts, st.lists(keys, max_size=3).map(tuple)),
    Reply: st.builds(Reply, numbers),
    Never: st.builds(Never, numbers, texts),
    Release: st.builds(Release, st.lists(keys, max_size=4).map(tuple)),
    Held: st.builds(Held, texts, texts),
    Failed: st.builds(Failed, workers, st.integers(0, 1 << 40), texts),
    Done: st.builds(Done, texts),
    Bye: st.just(Bye()),
}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_spelled_message_parses_back(kind: type) -> None:
    @given(MESSAGES[kind])
    def check(message: Message) -> None:
        assert parse(spell(message)) == message

    check()


@given(st.one_of(*MESSAGES.values()))
def test_a_spelling_is_one_line_that_begins_with_its_word(message: Message) -> None:
    text = spell(message)
    assert text.splitlines() == [text]
    assert text.partition(" ")[0] == WORDS[type(message)]


def test_every_word_is_spelled_by_one_kind_only() -> None:
    words = [WORDS[kind] for kind in MESSAGES]
    assert len(set(words)) == len(words)


def test_a_pull_reads_as_a_person_would_write_it() -> None:
    pull = Pull(7, Key(Worker("r1"), 3), "model.a.output", "")
    assert spell(pull) == 'pull [7,["r1","",3],"model.a.output",""]'


def test_a_key_names_request_block_and_access() -> None:
    assert str(Key(Worker("r", "edit"), 4)) == "r/edit#4"
    assert str(Key(Worker("r"), 4)) == "r#4"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pull",
        "pull []",
        "pull [1]",
        "pull {}",
        'pull [1,["r",""],"l",""]',
        'pull [1,["r","","x"],"l",""]',
        'pull [null,["r","",1],"l",""]',
        "reply",
        "reply []",
        "reply [[]]",
        'reply ["one"]',
        "release [3]",
        "release []",
        'release [[["r",""]]]',
        'failed ["r","",1]',
        "done",
        "done []",
        "held [1]",
        "never [1]",
        "hello [1]",
        "PULL []",
        "reply [1] [2]",
        "reply [Infinity]",
        "reply [NaN]",
        "\0\0\0",
        "reply " + "[" * 20_000,
    ],
    ids=lambda text: repr(text)[:40],
)
def test_garbage_is_refused_as_no_message(text: str) -> None:
    with pytest.raises(ValueError, match="not a message"):
        parse(text)


def test_names_that_are_no_text_become_text_and_can_be_looked_up() -> None:
    pull = parse('pull [1,[[],{},2],"l",""]')
    assert isinstance(pull, Pull)
    assert {pull.key: 1}[Key(Worker("[]", "{}"), 2)] == 1


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused_with_value_error(text: str) -> None:
    try:
        parse(text)
    except ValueError:
        pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from([WORDS[kind] for kind in MESSAGES]), json_values)
def test_any_fields_behind_a_known_word_parse_or_are_refused(word: str, fields: object) -> None:
    try:
        message = parse(f"{word} {json.dumps(fields)}")
    except ValueError:
        return
    assert parse(spell(message)) == message

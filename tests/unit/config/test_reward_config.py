"""Sources of reward in a recipe: what is taken, and what is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import HTTPReward, JudgeReward, MathReward, PairwiseJudge
from quartet.extras.sandbox.config import CodeReward

ALL = """
rewards:
- {type: model, path: rm}
- {type: function, target: 'a.py:f', thread: true, concurrency: 2, on_error: leave_out, deadline_s: 10}
- {type: exact_match, column: gold}
- {type: numeric, tolerance: 0.01}
- {type: regex, pattern: 'answer: (\\w)', column: letter}
- {type: format, tags: [think, answer], weight: 0.1}
- {type: length, max: 400, gate: {source: exact_match, at_least: 1.0, otherwise: -1.0}}
- {type: math, extract: [expr]}
- {type: code, score: all, memory_mb: 128}
- {type: http, url: 'http://localhost:8000/score', batch_size: 4, retry: {attempts: 2}}
- {type: judge, url: 'https://api/v1', model: m, api_key_env: KEY, method: {name: pairwise, column: other}}
"""


def complaint(source: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe("rl", None, [f"rewards.0={source}"])
    return caught.value


def test_every_type_and_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(ALL)
    recipe = load_recipe("rl", path, [])
    assert isinstance(recipe, RLRecipe)
    by_type: dict[str, Any] = {source.type: source for source in recipe.rewards}
    assert by_type["length"].gate.source == "exact_match"
    assert by_type["regex"].name == "regex" and by_type["function"].name is None
    assert isinstance(by_type["judge"].method, PairwiseJudge)
    assert [by_type[kind].on_error for kind in ("function", "math", "code", "http", "judge")] == [
        "leave_out",
        "stop",
        "stop",
        "leave_out",
        "leave_out",
    ]
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_recipe(recipe))
    assert load_recipe("rl", saved, []) == recipe


def test_defaults_stand_alone() -> None:
    http, judge = HTTPReward(url="http://localhost:1"), JudgeReward(url="http://localhost:1/v1", model="m")
    made = [MathReward(), CodeReward(), http, judge]
    assert [source.type for source in made] == ["math", "code", "http", "judge"]
    assert {source.weight for source in made} == {1.0} and all(source.gate is None for source in made)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{type: exact}", "rewards.0.type: exact"),
        ("{type: regex, pattern: '('}", "not a regular expression"),
        ("{type: regex, pattern: 'a', column: answer}", "has 0 groups"),
        ("{type: regex, pattern: '(a)(b)', column: answer}", "has 2 groups"),
        ("{type: format}", "either a `pattern` or a list of `tags`"),
        ("{type: format, pattern: a, tags: [b]}", "either a `pattern` or a list of `tags`"),
        ("{type: format, tags: []}", "tags is empty"),
        ("{type: format, tags: ['<think>']}", "names without brackets"),
        ("{type: format, pattern: '['}", "not a regular expression"),
        ("{type: length}", "by `max` or by `target`"),
        ("{type: length, max: 1, target: 1}", "by `max` or by `target`"),
        ("{type: length, max: 0}", "rewards.0.max: 0"),
        ("{type: numeric, tolerance: -1}", "rewards.0.tolerance: -1"),
        ("{type: numeric, gate: {source: numeric, at_least: 1}}", "gated by itself"),
        ("{type: numeric, gate: {source: x}}", "rewards.0.gate.at_least is missing"),
        ("{type: numeric, on_error: leave_out}", "unknown key 'on_error'"),
        ("{type: math, extract: []}", "rewards.0.extract"),
        ("{type: math, extract: [words]}", "rewards.0.extract.0"),
        ("{type: code, memory_mb: 1}", "rewards.0.memory_mb: 1"),
        ("{type: code, score: some}", "rewards.0.score"),
        ("{type: http}", "rewards.0.url is missing"),
        ("{type: http, url: localhost:80}", "written http://host:port/path"),
        ("{type: http, url: 'http://user:secret@host/'}", "written http://host:port/path"),
        ("{type: http, url: 'http://host/?key=1'}", "without a query"),
        *(
            (f"{{type: http, url: {url!r}}}", part)
            for url, part in (
                ("http://host:99999/", "url has no host and port"),
                ("http://host:0", "url has no host and port"),
                ("http://host:abc", "url has no host and port"),
                ("http://host:-1/x", "url has no host and port"),
                ("http://ho st/", "written http://host:port/path"),
                ("//host/score", "written http://host:port/path"),
                ("file:///etc/passwd", "written http://host:port/path"),
                ("http:///score", "written http://host:port/path"),
                ("http://:80/", "url has no host and port"),
                ("http://[::1/", "url has no host and port"),
                ("http://[cafe]/", "url has no host and port"),
                ("http://::1/", "url has no host and port"),
            )
        ),
        ("{type: http, url: 'http://h', timeout_s: 1.0e+300}", "rewards.0.timeout_s"),
        ("{type: http, url: 'http://h', retry: {longest_wait_s: 1.0e+300}}", "rewards.0.retry.longest_wait_s"),
        ("{type: math, timeout_s: 1.0e+300}", "rewards.0.timeout_s"),
        ("{type: function, target: 'a.py:f', processes: 0}", "rewards.0.processes: 0"),
        (
            "{type: judge, url: 'http://h', model: m, method: {name: pointwise, lowest: -1.0e+308, highest: 1.0e+308}}",
            "too far",
        ),
        ("{type: http, url: 'http://h', on_error: ignore}", "rewards.0.on_error"),
        ("{type: http, url: 'http://h', retry: {attempts: 0}}", "rewards.0.retry.attempts: 0"),
        ("{type: http, url: 'http://h', concurrency: 0}", "rewards.0.concurrency: 0"),
        ("{type: judge, url: 'http://h'}", "rewards.0.model is missing"),
        ("{type: judge, url: 'http://h', model: m, method: {name: both}}", "rewards.0.method.name: both"),
        (
            "{type: judge, url: 'http://h', model: m, method: {name: pointwise, lowest: 1, highest: 1}}",
            "less than highest",
        ),
        ("{type: judge, url: 'http://h', model: m, method: {name: pointwise, pattern: 'score'}}", "needs one group"),
        ("{type: judge, url: 'http://h', model: m, method: {name: pointwise, template: hello}}", "lacks {completion}"),
        ("{type: judge, url: 'http://h', model: m, method: {name: pairwise, template: '{a}'}}", "lacks {a} or {b}"),
    ],
)
def test_what_does_not_fit_is_refused(source: str, part: str) -> None:
    assert part in complaint(source).found


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "https://my-host_1.example.com:8443/a/b%20c",
        "http://[::1]:80/x",
        "http://bücher.example/",
        "http://h:/",
    ],
)
def test_addresses_that_servers_have(url: str) -> None:
    assert HTTPReward(url=url).url == url

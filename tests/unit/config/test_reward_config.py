"""Sources of reward in a recipe: what is taken, and what is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import HTTPReward, PairwiseJudge

ALL = """
rewards:
- {type: model, path: rm}
- {type: function, target: 'a.py:f', concurrency: 2, on_error: leave_out, deadline_s: 10}
- {type: exact_match, column: gold}
- {type: numeric, tolerance: 0.01}
- {type: regex, pattern: 'answer: (\\w)', column: letter}
- {type: format, tags: [think, answer], weight: 0.1}
- {type: length, max: 400}
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
        ("{type: length}", "by `max` or by `target`"),
        ("{type: numeric, on_error: leave_out}", "unknown key 'on_error'"),
        ("{type: http, url: localhost:80}", "written http://host:port/path"),
        ("{type: http, url: 'http://user:secret@host/'}", "written http://host:port/path"),
        ("{type: http, url: 'http://host/?key=1'}", "without a query"),
        ("{type: http, url: 'http://ho st/'}", "written http://host:port/path"),
        ("{type: http, url: 'http://h', timeout_s: 1.0e+300}", "rewards.0.timeout_s"),
        ("{type: http, url: 'http://h', retry: {longest_wait_s: 1.0e+300}}", "rewards.0.retry.longest_wait_s"),
        (
            "{type: judge, url: 'http://h', model: m, method: {name: pointwise, lowest: -1.0e+308, highest: 1.0e+308}}",
            "too far",
        ),
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
        "http://bücher.example/",
    ],
)
def test_addresses_that_servers_have(url: str) -> None:
    assert HTTPReward(url=url).url == url

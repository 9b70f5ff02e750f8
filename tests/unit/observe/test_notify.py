"""Messages, sent by apprise to a server of this machine."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from json_server import served
from quartet.config.errors import Interrupted, UserError
from quartet.config.load import dump_recipe
from quartet.config.recipe import SFTRecipe
from quartet.config.run import LogConfig, NotifyConfig
from quartet.observe import callbacks
from quartet.observe.callbacks import Callback, Callbacks, Control

pytest.importorskip("apprise")


def notified(config: NotifyConfig, path: Path, told: list[str]) -> Callbacks:
    return Callbacks([callbacks.Notifier(config, told.append)], Control(SFTRecipe(), path))


def address(url: str) -> str:
    return url.replace("http://", "json://") + "/hook"


def test_the_end_a_failure_and_an_alarm_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    with served(lambda body: (200, {})) as asked:
        config = NotifyConfig(urls=(address(asked.url),))
        first = notified(config, tmp_path / "ppo-1", told)
        first.begin()
        first(Callback.on_log, 3, {"alarm/reward_hacking": 0.0})
        first(Callback.on_log, 4, {"alarm/reward_hacking": 1.0})
        first(Callback.on_train_end)
        for error in (ValueError("no such row"), Interrupted(tmp_path, 3)):
            other = notified(config, tmp_path / "ppo-2", told)
            other.begin()
            other.fail(error)
        few = notified(NotifyConfig(urls=(address(asked.url),), on=("alarm",)), tmp_path / "ppo-3", told)
        few(Callback.on_train_end)
    words = [(body["title"], body["message"].splitlines()[0]) for body in asked.bodies]
    assert words == [
        ("quartet ppo-1: alarm", "reward hacking? The alarm was raised at step 4; see alarms.jsonl or the report"),
        ("quartet ppo-1: end", "the run has ended"),
        ("quartet ppo-2: failure", "the run has failed: ValueError: no such row"),
        ("quartet ppo-2: end", "a signal has stopped the run; --resume goes on"),
    ]
    assert told == []


def test_an_unreachable_address_is_told_once_and_keeps_nobody(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    told: list[str] = []
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"json://127.0.0.1:{held.getsockname()[1]}/secret-token"
        callbacks = notified(NotifyConfig(urls=(url,)), tmp_path, told)
        begun = time.monotonic()
        for step in range(3):
            callbacks(Callback.on_log, step, {"alarm/reward_hacking": 1.0})
        assert time.monotonic() - begun < 0.5
        callbacks(Callback.on_train_end)
    assert time.monotonic() - begun < 20
    assert len(told) == 2 and "the run goes on" in told[0] and "4 messages were not sent" in told[1]
    out, err = capfd.readouterr()
    assert "secret-token" not in "".join([*told, out, err])


def test_addresses_of_the_environment_and_of_a_saved_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="NO_SUCH_VARIABLE is not set"):
        notified(NotifyConfig(urls_env="NO_SUCH_VARIABLE"), tmp_path, [])
    with served(lambda body: (200, {})) as asked:
        monkeypatch.setenv("MY_URLS", f"{address(asked.url)} {address(asked.url)}2")
        notified(NotifyConfig(urls_env="MY_URLS"), tmp_path, [])(Callback.on_train_end)
    assert asked.paths == ["/hook", "/hook2"]
    recipe = SFTRecipe(log=LogConfig(notify=NotifyConfig(urls=("json://h/secret-token",))))
    saved = dump_recipe(recipe.model_copy(update={"seed": 1}))
    assert "secret-token" not in saved + repr(recipe)
    with pytest.raises(UserError, match="keeps no address") as caught:
        notified(NotifyConfig(urls=("**********",)), tmp_path, [])
    assert "secret-token" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        notified(NotifyConfig(urls=("nonsense secret-token",)), tmp_path, [])
    assert "secret-token" not in str(caught.value) and "log.notify.urls.0 is none" in caught.value.found


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    with pytest.raises(UserError, match=r"quartet-rl\[notify\]"):
        callbacks.Notifier(NotifyConfig(urls=("json://h",)), print)

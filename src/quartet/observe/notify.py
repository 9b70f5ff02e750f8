"""Messages when a run ends, fails, raises an alarm or does not look healthy, through apprise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from quartet.config.errors import Interrupted, UserError
from quartet.config.foreign import described
from quartet.config.logs import NotifyConfig
from quartet.observe.background import BestEffortThread
from quartet.observe.callbacks import Callback
from quartet.observe.health import Finding

_ALARM = "alarm/reward_hacking"
_MASKED = "**********"
"""What a saved recipe has in the place of an address."""


class Notifier(Callback):
    """Sends messages from a thread of its own, so that the run waits for none; what cannot be sent is told once.

    Raises:
        UserError: apprise is missing, or there is an address that it cannot use. Addresses hold secrets, so that no
            message shows one.
    """

    def __init__(self, config: NotifyConfig, tell: Callable[[str], object]) -> None:
        try:
            import apprise
        except ModuleNotFoundError:
            raise UserError(
                "messages need a package that is not installed",
                found="log.notify is set; there is no module apprise",
                remedy="pip install 'quartet-rl[notify]', or leave log.notify out",
            ) from None
        # Its own words about failures go where its users send them, and not to stderr by default.
        logging.getLogger("apprise").addHandler(logging.NullHandler())
        self._on, self._tell = config.on, tell
        self._senders: list[Any] = []
        self._thread = BestEffortThread("log.notify", tell, attempts=3)
        for place, url in _addresses(config):
            self._senders.append(apprise.Apprise())
            if not self._senders[-1].add(url):
                raise UserError(
                    "messages cannot go to an address",
                    found=f"{place} is {'only stars: a saved recipe keeps no address' if url == _MASKED else 'none'}",
                    remedy="write it as apprise does (json://host:port/path), best into the variable of urls_env",
                )

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics.get(_ALARM) == 1.0:
            self._send("alarm", f"reward hacking? The alarm was raised at step {step}; see alarms.jsonl or the report")

    def on_health(self, step: int, finding: Finding) -> None:
        self._send("alarm", finding.text)

    def on_train_end(self) -> None:
        self._send("end", "the run has ended")
        self._close()

    def on_exception(self, error: BaseException) -> None:
        if isinstance(error, Interrupted | KeyboardInterrupt):
            self._send("end", "a signal has stopped the run; --resume goes on")
        else:
            self._send("failure", f"the run has failed: {described(error)}")
        self._close()

    def _send(self, occasion: str, text: str) -> None:
        path = self.control.path
        for sender in self._senders if occasion in self._on else ():
            words = {"title": f"quartet {path.name}: {occasion}", "body": f"{text}\n{path.absolute()}"}
            self._thread.submit(partial(_notify, sender, words))

    def _close(self) -> None:
        self._thread.close()
        if self._thread.num_dropped:
            self._tell(f"log.notify: {self._thread.num_dropped} messages were not sent")


def _notify(sender: Any, words: Mapping[str, str]) -> None:
    if not sender.notify(**words):
        raise ConnectionError("an address took no message")


def _addresses(config: NotifyConfig) -> list[tuple[str, str]]:
    """Each address, and where it stands."""
    found = [(f"log.notify.urls.{i}", url.get_secret_value()) for i, url in enumerate(config.urls)]
    if config.urls_env is not None:
        named = os.environ.get(config.urls_env, "").split()
        if not named:
            raise UserError(
                "there is no address for messages",
                found=f"the environment variable {config.urls_env} is not set",
                remedy=f"export {config.urls_env}='json://…', or leave log.notify out",
            )
        found += [(f"address {i} of {config.urls_env}", url) for i, url in enumerate(named)]
    return found

"""Which Ray cluster a process joins: its address, checked before Ray itself is asked, which would try for a minute."""

from __future__ import annotations

import socket
import threading

import ray
from ray.exceptions import RayError

from quartet.config.errors import UserError

NAMESPACE = "quartet"


def check_same(address: str | None) -> None:
    """A process has one connection to Ray; a second back end shares it."""
    there = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", there):
        raise UserError(
            "this process is connected to another Ray cluster",
            found=f"address={address!r}, connected to {there!r}",
            remedy="close that back end first, or leave the address out",
        )


def join_cluster(address: str, timeout_s: float, log_to_driver: bool) -> None:
    if address.startswith("ray://"):
        raise UserError(
            "Ray's client protocol cannot carry worker groups",
            found=f"address={address!r}",
            remedy="submit the program as a Ray job, or run it on a node of the cluster with address='auto'",
        )
    if address not in ("auto", "local"):
        _check_answers(address, timeout_s)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=log_to_driver)
    except (ConnectionError, RuntimeError) as error:
        raise _unreachable(address, str(error).strip().splitlines()[0]) from error


def _check_answers(address: str, timeout_s: float) -> None:
    """Ray itself would go on trying for a minute, or end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            "this is no address of a Ray cluster",
            found=f"address={address!r}",
            remedy="write host:port as `ray start --head` prints it (the port is 6379 by default), or auto",
        )
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise _unreachable(address, str(error)) from error
    answer: list[BaseException | None] = []

    def ask() -> None:
        try:
            ray._raylet.GcsClient(address=address)
            answer.append(None)
        except RayError as error:
            answer.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    if answer != [None]:
        raise _unreachable(address, str(answer[0]) if answer else f"no answer within {timeout_s:g} s")


def _unreachable(address: str, why: str) -> UserError:
    return UserError(
        "the Ray cluster does not answer",
        found=f"address={address!r}: {why}",
        remedy="check the address and that `ray status --address …` answers from this machine, start one with "
        "`ray start --head`, or leave the address out to start Ray on this machine",
    )

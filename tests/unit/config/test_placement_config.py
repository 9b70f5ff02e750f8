"""Placements as recipes have them: what is refused, and what the others resolve to."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from quartet.config.errors import UserError
from quartet.config.placement import PlacementConfig, ResolvedPlacement, Role, check_devices, resolve_placement

PPO: dict[str, Role] = {role: role for role in ("actor", "critic", "reference", "reward", "rollout")}
GRPO: dict[str, Role] = {role: role for role in ("actor", "reward", "rollout")}


def read(**fragment: Any) -> PlacementConfig:
    return TypeAdapter(PlacementConfig).validate_python(fragment)


def resolved(roles: dict[str, Role] = PPO, **fragment: Any) -> ResolvedPlacement:
    return resolve_placement(read(**fragment), roles)


def pools(**roles: list[str]) -> dict[str, Any]:
    return {name: {"processes": 2, "roles": tuple(placed)} for name, placed in roles.items()}


ALL = ["actor", "critic", "reference", "reward", "rollout"]
FOUR = {"processes": 4}
EVERY_TYPE: dict[str, dict[str, Any]] = {
    "separated": {role: FOUR for role in ALL},
    "forward_offload": {"rollout": FOUR, "actor_reference": FOUR, "critic_reward": FOUR},
    "homogeneous": {"rollout": FOUR, "models": FOUR},
    "full_offload": {"pool": FOUR},
    "pipelined": {"pools": pools(a=["rollout", "actor"], b=["critic", "reference", "reward"])},
    "asynchronous": {"pools": pools(a=["rollout"], b=["actor", "critic", "reference", "reward"])},
}


@pytest.mark.parametrize(
    ("kind", "homes"),
    [
        ("separated", {role: role for role in ALL}),
        (
            "forward_offload",
            {
                "rollout": "rollout",
                "actor": "actor_reference",
                "reference": "actor_reference",
                "critic": "critic_reward",
                "reward": "critic_reward",
            },
        ),
        ("homogeneous", {role: "rollout" if role == "rollout" else "models" for role in ALL}),
        ("full_offload", dict.fromkeys(ALL, "pool")),
        ("pipelined", {role: "a" if role in ("rollout", "actor") else "b" for role in ALL}),
        ("asynchronous", {role: "a" if role == "rollout" else "b" for role in ALL}),
    ],
)
def test_every_placement_says_where_each_role_works(kind: str, homes: dict[str, str]) -> None:
    placement = resolved(type=kind, **EVERY_TYPE[kind])
    assert placement.type == kind and placement.pool_of == homes
    assert {pool.name for pool in placement.pools} == set(homes.values())


def test_only_asynchronous_generation_runs_ahead() -> None:
    for kind, fields in EVERY_TYPE.items():
        placement = resolved(type=kind, **fields)
        assert placement.max_staleness == (1 if kind == "asynchronous" else None)
    finish = resolved(type="asynchronous", max_staleness=3, in_flight="finish_old", **EVERY_TYPE["asynchronous"])
    assert (finish.max_staleness, finish.in_flight) == (3, "finish_old")


def test_scoring_waits_for_generation_unless_chunks_are_pipelined() -> None:
    early = {kind for kind, fields in EVERY_TYPE.items() if resolved(type=kind, **fields).scores_early}
    assert early == {"pipelined", "asynchronous"}


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_heads_that_learn_along_are_with_the_actor(kind: str) -> None:
    """Named among a pool's roles or not."""
    homes = resolved({**PPO, "heads": "heads"}, type=kind, **EVERY_TYPE[kind]).pool_of
    assert homes["heads"] == homes["actor"]
    if "pools" in EVERY_TYPE[kind]:
        named = pools(a=["rollout"], b=["actor", "heads", "critic", "reference", "reward"])
        assert resolved({**PPO, "heads": "heads"}, type=kind, pools=named).pool_of["heads"] == "b"
        assert "heads" not in resolved(type=kind, pools=named).pool_of


def test_several_reward_models_share_the_place_of_the_reward() -> None:
    roles: dict[str, Role] = {**GRPO, "helpful": "reward", "harmless": "reward"}
    placement = resolved(roles, type="pipelined", pools=pools(a=["rollout", "actor"], b=["reward"]))
    assert placement.pool_of["helpful"] == placement.pool_of["harmless"] == "b"


def test_sizes() -> None:
    placement = resolved(type="full_offload", pool={"processes": 8, "nodes": 2, "slots": 2, "budget_bytes": 10})
    (only,) = placement.pools
    assert (only.num_processes, only.processes_per_node, only.slots, only.budget_bytes) == (16, (8, 8), 2, 10)
    assert placement.num_processes == 16


@pytest.mark.parametrize(
    ("fragment", "says"),
    [
        ({"type": "full_offload", "pool": FOUR, "max_staleness": 1}, "max_staleness"),
        ({"type": "separated", **EVERY_TYPE["separated"], "actor": {"slots": 2}}, "slots"),
        ({"type": "pipelined", "pools": pools(a=ALL), "in_flight": "pick_up"}, "in_flight"),
        ({"type": "pipelined", "pools": pools(a=ALL, b=["actor"])}, r"role actor is on 2 pools \(a, b\)"),
        ({"type": "pipelined", "pools": pools(a=[])}, "at least 1 item"),
        ({"type": "colocated"}, "separated"),
    ],
)
def test_what_cannot_be_written(fragment: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        read(**fragment)


@pytest.mark.parametrize(
    ("roles", "fragment", "found", "remedy"),
    [
        (
            PPO,
            {"type": "separated", "actor": FOUR, "rollout": FOUR, "reference": FOUR, "reward": FOUR},
            "role 'critic' has no pool",
            "give the critic a pool",
        ),
        (
            {**GRPO, "helpful": "reward"},
            {"type": "pipelined", "pools": pools(a=["rollout", "actor"], b=["critic"])},
            "role 'reward' has no pool\n  found: placement pipelined: actor on a, critic on b, rollout on a",
            "give the reward a pool",
        ),
        (
            GRPO,
            {"type": "separated", **{role: FOUR for role in ALL}},
            "pool 'critic' would do nothing\n  found: 4 processes for critic",
            "leave the pool out",
        ),
        (
            {**GRPO, "heads": "heads"},
            {"type": "pipelined", "pools": pools(a=["rollout", "actor"], b=["reward", "heads"])},
            "heads on pool 'b', actor on 'a'",
            "put heads beside the actor, or leave them out of placement.pools.b.roles",
        ),
    ],
)
def test_what_this_run_cannot_have(roles: dict[str, Role], fragment: dict[str, Any], found: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved(roles, **fragment)
    assert found in str(caught.value) and remedy in str(caught.value), caught.value


def test_pools_that_fit_and_pools_that_do_not() -> None:
    placement = resolved(type="forward_offload", **EVERY_TYPE["forward_offload"])
    for nodes in ([12], [8, 4], [4, 4, 4], [7, 6, 5]):
        check_devices(placement, nodes)
    with pytest.raises(UserError) as caught:
        check_devices(placement, [8])
    message = str(caught.value)
    assert "12 processes (nodes × processes: rollout 1 × 4, actor_reference 1 × 4, critic_reward 1 × 4)" in message
    assert "8 devices on 1 nodes of 8" in message
    assert "give the pools fewer processes, put the roles on fewer pools" in message


def test_devices_must_lie_on_the_nodes_that_are_asked_for() -> None:
    spread = resolved(type="full_offload", pool={"processes": 4, "nodes": 2})
    check_devices(spread, [4, 4])
    with pytest.raises(UserError, match=r"pool 2 × 4\); 8 devices on 1 nodes"):
        check_devices(spread, [8])


@pytest.mark.parametrize("nodes", [[], [0], [0, 0]])
def test_a_cluster_without_devices_is_said_to_have_none(nodes: list[int]) -> None:
    with pytest.raises(UserError) as caught:
        check_devices(resolved(type="full_offload", pool={}), nodes)
    assert "add nodes" in caught.value.remedy

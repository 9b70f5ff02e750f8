"""Names that begin with an underscore belong to those who made them: what is used of torch's and Ray's is listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PACKAGE = Path(__file__).parents[2] / "src" / "quartet"
LISTED = {
    # torch 2.11, 2.12 and 2.13
    "_version": "counts changes in place; autograd's own check reads it, and there is no other",
    "_scaled_dot_product_flash_attention_for_cpu": "attention with the log-sum-exp of its scores",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "its gradients, from gradients of both outputs",
    "_scaled_dot_product_flash_attention": "an operator that recomputation keeps; these have no other names",
    "_scaled_dot_product_efficient_attention": "as above",
    "_scaled_dot_product_cudnn_attention": "as above",
    "_flash_attention_forward": "as above",
    "_efficient_attention_forward": "as above",
    "_reorder_linear_weight": "packs a weight for oneDNN",
    "_linear_pointwise": "multiplies with a packed weight",
    "_record_function_enter_new": "operators of torch's own hooks within a recomputed layer, which recomputation is to",
    "_record_function_exit": "pass over; they have no other names",
    "_RecordFunction": "as above",
    # Ray 2.60
    "_actor_id": "an actor's death names it by its id, which a handle tells nowhere else",
}
OTHERS = {
    "_exit",  # os: documented
    "_base_executable",  # sys
    "_attn_implementation",  # transformers, as are the following
    "_auto_class",
    "_compile_jinja_template",
    "_from_config",
    "_get_mm_fields_config",  # vLLM: how what a tower takes is cut by pictures; its engine core is internal as well
    "_keys_to_ignore_on_save",
    "_model_mapping",
    "_weight_conversions",
}
OF_TORCH = {*dir(nn.Module()), *dir(Tensor), *dir(DTensor), "_parameters", "_modules", "_buffers"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yields what a module defines: functions, classes, variables, attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def used_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yields private names of others: imported, read of anything but ``self``, or asked for by ``getattr``."""
    for node in ast.walk(tree):
        found: list[str] = []
        match node:
            case ast.Import(names=names):
                found = [part for name in names for part in name.name.split(".")]
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("quartet"):
                found = [*module.split("."), *(name.name for name in names)]
            case ast.Attribute(value=value, attr=attr) if attr not in own or (attr in OF_TORCH and not is_self(value)):
                found = [attr]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(attr)), *_]
            ):
                found = [attr] if attr not in own else []
        yield from filter(is_private, found)


def used(sources: dict[str, str]) -> dict[str, set[str]]:
    """Maps every private name of others to the files that use it."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    own = {name for tree in trees.values() for name in own_names(tree)}
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in used_names(tree, own):
            found.setdefault(name, set()).add(file)
    return found


def test_private_names_of_torch_and_ray_are_those_listed() -> None:
    found = used({str(file.relative_to(PACKAGE)): file.read_text("utf-8") for file in PACKAGE.rglob("*.py")})
    unlisted = {name: files for name, files in found.items() if name not in {*LISTED, *OTHERS}}
    assert not unlisted
    assert not {*LISTED, *OTHERS} - set(found), "listed, but no longer used"


def test_what_counts_as_a_private_name_of_others() -> None:
    theirs = """
import ray._raylet
from torch.utils._pytree import tree_map
from torch.distributed import _functional_collectives as collectives
from quartet.models.attention import _ours
ray._private.state.nodes()
module._parameters["weight"]
self.layer._buffers
tensor._local_tensor
getattr(function, "_torchdynamo_disable", False)
"""
    ours = """
_ = 1
class Ours:
    def __init__(self):
        self._own = self._parameters = __file__
    def _method(self, other):
        return other._own + self._method + self._parameters + other.__dict__ + getattr(other, "_own")
"""
    expected = {"_raylet", "_pytree", "_functional_collectives", "_private", "_parameters", "_buffers"}
    assert set(used({"theirs": theirs, "ours": ours})) == {*expected, "_local_tensor", "_torchdynamo_disable"}
    assert set(used({"ours": ours})) == set()

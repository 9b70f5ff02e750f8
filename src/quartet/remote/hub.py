"""Models of the Hugging Face hub: fetched once per machine, then read from the cache; and uploaded.

A name is ``owner/name`` or ``owner/name@revision``, where the revision is a branch, a tag or a commit. Cache, endpoint
and credentials are huggingface_hub's own (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``, ``HF_TOKEN`` or
``hf auth login``); a token is neither kept nor shown here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from quartet.config.errors import UserError, write_error

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "README.md"]
_OTHER_WEIGHTS = ["consolidated*", "*/*.safetensors", "*/*.bin"]
"""The same weights once more, or those of other models."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FAILURES = (HTTPError, OSError, RuntimeError, ValueError)
_TIMEOUT_S = 10.0
_LOG_IN = "log in by `hf auth login`, or set HF_TOKEN"


def split_name(name: str) -> tuple[str, str | None]:
    """Splits a name into repository and revision; None for its main branch."""
    repo, _, revision = name.partition("@")
    return repo, revision or None


def download_model(name: str, *, weights: bool = True) -> Path:
    """Returns the directory of the cache with the model's files, all of them there; its name is the commit.

    What is there of a commit is not asked for again.

    Args:
        weights: False for a tokenizer.

    Raises:
        UserError: the hub has no such model or revision, does not give it to this user, or cannot be reached and the
            cache lacks it.
    """
    repo, revision = split_name(name)
    ignored = _OTHER_WEIGHTS if weights else [*_OTHER_WEIGHTS, "*.safetensors"]
    with _explained(name):
        get = partial(snapshot_download, repo, allow_patterns=_FILES, ignore_patterns=ignored)
        cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
        if (cache / "trees" / f"{revision}.json").is_file():  # of a commit: what belongs to it is known
            with contextlib.suppress(LocalEntryNotFoundError):
                found = Path(get(revision=revision, local_files_only=True))
                if not weights or any(found.glob("*.safetensors")):
                    return found
        found = Path(get(revision=revision))
        if weights and not any(found.glob("*.safetensors")):
            with contextlib.suppress(LocalEntryNotFoundError):  # who loads it says which weights are missing
                snapshot_download(repo, revision=found.name, allow_patterns=["pytorch_model*.bin"])
    return found


def pin_revision(name: str, *, weights: bool = True) -> tuple[str, str | None]:
    """Returns ``owner/name@commit`` of what the revision is now, and a remark where only the cache could tell.

    Raises:
        UserError: as of ``download_model``.
    """
    repo, revision = split_name(name)
    if revision is not None and _COMMIT.fullmatch(revision):
        return name, None
    is_known = current_commit(name) is not None
    commit = download_model(name, weights=weights).name  # by its branch, which the cache then knows offline, too
    if is_known:
        return f"{repo}@{commit}", None
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no answer"
    return f"{repo}@{commit}", f"{name}: the hub was not asked ({why}); the cache's commit {commit[:12]} is used"


def current_commit(name: str) -> str | None:
    """Returns the commit that the revision is now; None where the hub does not say."""
    repo, revision = split_name(name)
    try:
        return HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT_S).sha
    except _FAILURES:
        return None


def upload_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Uploads ``folder`` into a repository, which is made where there is none; returns the commit's address.

    Args:
        private: of a new repository; None: as the owner's account has it.
        token: None: the one that is logged in.
        revision: a branch, which is made where there is none; None: the main one.

    Raises:
        UserError: the hub refuses it or cannot be reached; ``folder`` is left as it is.
    """
    with _explained(repo_id, folder, token):
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message or "Upload a model"
        ).commit_url


# Errors -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(name: str, folder: Path | None = None, token: str | None = None) -> Iterator[None]:
    """Turns into a user error what the hub refuses in the ``with`` block, without any token in it."""
    try:
        yield
    except HFValidationError as error:
        raise UserError(
            "this is no name of the hub",
            found=f"{name!r}: {_line(error)}",
            remedy="name owner/name, or a directory that is there",
        ) from None
    except _FAILURES as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise write_error(Path(error.filename), error, what="the hub's cache: ") from error
        why: Exception = error
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            why = error.__cause__  # of no help from the hub, before the cache was looked into
        sent = token or get_token()
        problem, remedy = _problem(name, why)
        if folder is not None:
            problem = f"the model could not be uploaded to {name}"
            remedy = f"{_LOG_IN}, with a token that may write there, and push again; the model is whole in {folder}"
        found = f"{_line(why)}; {'a token is set' if sent else 'no token: nobody is logged in'}"
        # The library's errors hold requests with their headers, so none is kept as the cause.
        raise UserError(problem, found=found.replace(sent, "…") if sent else found, remedy=remedy) from None


def _problem(name: str, error: Exception) -> tuple[str, str]:
    """Tells what is wrong, and what to do, where a model could not be had."""
    repo, revision = split_name(name)
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision or 'main'!r}", "name a branch, a tag or a whole commit of it"
    if isinstance(error, RepositoryNotFoundError) or _status(error) in (401, 403):
        return f"the hub does not give {repo} to you, or has no such model", (
            f"check the name; for a private model {_LOG_IN}; for a gated one accept its licence at "
            f"{constants.ENDPOINT}/{repo}, too; for a model of your own give its directory"
        )
    return f"{name} could not be fetched from the hub, and is not in the cache", (
        f"check the network, HF_ENDPOINT ({constants.ENDPOINT}) and HF_HUB_OFFLINE ({constants.HF_HUB_OFFLINE}), run "
        f"`hf download {repo}` where there is a network, or give a local directory"
    )


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    status = _status(error)
    text = lines[0] if lines else type(error).__name__
    return text if status is None or str(status) in text else f"{status} {text}"

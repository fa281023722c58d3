"""Upload of an export to the Hugging Face Hub."""

import shlex
from pathlib import Path

from fmoe.errors import UserError, one_line, require

# Weights of an earlier export, in other files, would be loaded instead of the new ones.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.gguf"]


def check_upload(repo: str) -> None:
    """Check the name of a repository, and that a token is there. Nothing is sent.

    Raises:
        UserError: the name has not the form OWNER/NAME, or there is no token.
    """
    hub = require("huggingface_hub", "pretrain", "--push")
    try:
        require("huggingface_hub.utils", "pretrain", "--push").validate_repo_id(repo)
    except ValueError as error:
        raise UserError(f"--push {repo!r} is not the name of a repository: {one_line(error)}") from error
    if repo.count("/") != 1:
        raise UserError(f"--push {repo!r} must have the form OWNER/NAME")
    if not hub.get_token():
        raise UserError(f"--push {repo} needs a token of the Hugging Face Hub: run hf auth login, or set HF_TOKEN")


def upload(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload a complete export, and return the address of the repository. Creates the repository if it is missing.

    Files of the same names, and weights of an earlier export, are replaced in one commit.

    Raises:
        UserError: the upload failed, or ``private`` is set and the repository is public. The folder remains.
    """
    hub = require("huggingface_hub", "pretrain", "--push")
    api = hub.HfApi()
    try:
        address = str(api.create_repo(repo, private=private or None, exist_ok=True))
        if private and not api.model_info(repo).private:
            raise UserError("the repository exists and is public: make it private, or omit --private")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export of fmoe", delete_patterns=_REPLACED)
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        command = shlex.join(["hf", "upload", repo, str(folder), *(["--private"] if private else [])])
        raise UserError(
            f"{folder} is complete, but was not uploaded to {repo}: {one_line(error)}; to retry: {command}"
        ) from error
    return address

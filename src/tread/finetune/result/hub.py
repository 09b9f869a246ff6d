"""`push_to_hub`: upload the result of a finished run to the Hugging Face hub.

- Only the result, its model card and the card's previews are uploaded, in one commit: no checkpoints, no config (which
  names local folders) and no metrics.
- The token comes from the environment (HF_TOKEN, or `hf auth login`), never a setting.
- A missing token or an impossible name is refused before a run begins. A failed upload does not fail the run, whose
  result is on the disk: the warning has the command that uploads it.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from tread.errors import ConfigError, one_line, shortened
from tread.finetune.result.write import CARD, RECORD
from tread.finetune.settings import FinetuneConfig
from tread.training.checkpoint import CHECKPOINTS, newest


def repo_name(config: FinetuneConfig) -> str:
    """The repository that a config pushes to; without an owner, it belongs to the token's user."""
    return config.hub_model_id or Path(config.output_dir).name


def check_hub(config: FinetuneConfig) -> None:
    """Refuse a name that the hub does not accept, and a missing token, without a request."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_name(config))
    except HFValidationError as error:
        raise ConfigError(
            f"hub_model_id is {config.hub_model_id!r}, which the hub does not take ({error}): write OWNER/NAME."
        ) from error
    if get_token() is None:
        raise ConfigError(
            "push_to_hub is true, but there is no token: set HF_TOKEN in the environment to one that may write, or "
            "set push_to_hub to false."
        )


def push(folder: Path, config: FinetuneConfig, say: Callable[[str], object]) -> None:
    """Upload the result in `folder`; a failure is only reported, with the command to upload it."""
    from huggingface_hub import HfApi

    name = repo_name(config)
    try:
        api = HfApi()
        name = api.create_repo(name, private=config.hub_private, exist_ok=True).repo_id
        step = json.loads((folder / RECORD).read_bytes())["step"]
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=files_of(folder),
            commit_message=f"The result after {step} steps",
        )
        say(f"uploaded: {done.commit_url}")
    except Exception as error:  # any error of the network or the hub: the result is on the disk
        reason = shortened(one_line(error).rstrip("."), 300)
        say(
            f"warning: the run is complete, but its result could not be uploaded: {reason}. "
            f"`hf upload {name} {shlex.quote(str(folder))} --exclude 'checkpoints/*'` does it."
        )


def files_of(folder: Path) -> list[str]:
    """The files of a result, relative to its folder: adapter or weights, the card, and the previews that it shows."""
    found = newest(folder / CHECKPOINTS, lambda _: None)
    previews = [path for _, path in found[1].get("previews", ())] if found else []
    result = json.loads((folder / RECORD).read_bytes())["files"]
    return [*result, CARD, *(path for path in previews if (folder / path).is_file())]

"""Rules for the keys of data entries, and for `caption_strategy`, which a config gives to all of them."""

from collections.abc import Mapping
from typing import Any

from tread.finetune.compat.rules import OFF, Outcome, is_theirs


def captions(value: Any, config: Mapping[str, Any]) -> Outcome:
    """caption_strategy is a key of data entries here; `left_out` copies it to those of data_backend_config."""
    if value in OFF:
        return Outcome.ignored("off")
    if is_theirs(config):
        return Outcome(verdict="translated", text="caption_strategy of the data entries that have none")
    return Outcome.unsupported("write it in the data entry")


def columns(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """Column names, which other trainers nest in a mapping, become keys of the data entry."""
    if not isinstance(value, Mapping):
        return Outcome.unsupported("write image_column, caption_column and split in the entry itself")
    known = ("image_column", "video_column", "caption_column", "split")
    if others := [key for key in value if key not in known]:
        return Outcome.unsupported(
            f"{', '.join(others)}: choose the rows before, in a dataset of your own; write the rest in the entry"
        )
    flat = dict(value)
    files = flat.pop("video_column", None)
    if files is not None and (entry.get("dataset_type") == "video" or "image_column" not in flat):
        flat["image_column"] = files
    return Outcome.translated({key: flat[key] for key in flat if key not in entry})


def visits(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """`repeats` counts all visits here, but only those after the first in the existing trainer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return Outcome.runs(repeats=value)
    return Outcome.translated({"repeats": value + 1}, "all visits are counted, there those after the first")


def video(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """The settings of clips, without those that are fixed by the model here."""
    decided = ("is_i2v", "bucket_strategy", "frame_interval")
    if not isinstance(value, Mapping) or not (left := [key for key in decided if key in value]):
        return Outcome.runs(video=value)
    kept = {key: item for key, item in value.items() if key not in decided}
    text = f"video without {', '.join(left)}: the model decides, and clips have as many frames as it takes"
    return Outcome(verdict="translated", text=text, settings={"video": kept})


def regularisation(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """Regularisation data trains like any other data, with its loss_weight."""
    if value in OFF:
        return Outcome.ignored("off")
    weight = entry.get("loss_weight", 1)
    return Outcome.differs({}, f"its samples train like the rest, with a loss_weight of {weight}")


def one_prompt(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """One caption for all samples is the caption strategy instanceprompt."""
    return Outcome.ignored("off") if value in OFF else Outcome.translated({"caption_strategy": "instanceprompt"})


def prompt_first(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """The instance prompt before every caption is the entry's caption_prefix."""
    if value in OFF or not entry.get("instance_prompt"):
        return Outcome.ignored("off")
    return Outcome.translated({"caption_prefix": entry["instance_prompt"]})

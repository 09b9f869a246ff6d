"""Captions as a model is taught them: trigger word, prefix and suffix, and variants with shuffled or dropped tags.

- Text is encoded ahead of training, so a caption cannot change at every visit: tags are put into a bounded number of
  orders (`caption_variants`), each encoded once, and a visit draws one of them like one of several captions.
- A variant is a hash of the caption and the variant's number. It is the same in every run, process and epoch, so that
  runs share the cache; which one a visit draws depends on the run's seed (`finetune.data.picks`).
- Nothing is added to the empty caption, which replaces dropped ones.
"""

import hashlib
import re

from tread.data.captioned.entries import DataConfig

TRIGGER = "[trigger]"
"""Placeholder of the trigger word in captions and prompts."""
_PUNCTUATION = ",.;:!?"


def variants(caption: str, config: DataConfig) -> tuple[str, ...]:
    """The captions to encode for one caption of the data.

    >>> entry = DataConfig(instance_data_dir="photos", trigger_word="ohwx", caption_prefix="a photo of")
    >>> variants("a cat", entry)
    ('ohwx, a photo of a cat',)
    """
    count = config.caption_variants if config.shuffle_tags or config.tag_dropout else 1
    return tuple(_framed(_tagged(caption, config, number), config) for number in range(count))


def triggered(text: str, word: str | None) -> str:
    """A prompt with the trigger word in place of `[trigger]`."""
    return text if word is None else text.replace(TRIGGER, word)


def _tagged(caption: str, config: DataConfig, number: int) -> str:
    """The caption with its tags shuffled and dropped as variant `number` draws them."""
    if not (config.shuffle_tags or config.tag_dropout):
        return caption
    separator = config.tag_separator.strip() or " "
    tags = [tag for part in caption.split(separator) if (tag := part.strip())]
    kept, free = tags[: config.keep_tags], tags[config.keep_tags :]
    drawn = hashlib.shake_128(f"{number} {caption}".encode()).digest(8 * len(free))
    numbers = [int.from_bytes(drawn[4 * i : 4 * i + 4]) for i in range(2 * len(free))]
    ranks, chances = numbers[: len(free)], numbers[len(free) :]
    order = sorted(range(len(free)), key=lambda i: (ranks[i], i)) if config.shuffle_tags else list(range(len(free)))
    left = [i for i in order if chances[i] >= config.tag_dropout * 2**32]
    if not (kept or left) and free:
        left = [max(order, key=lambda i: chances[i])]
    return f"{separator.strip()} ".join([*kept, *(free[i] for i in left)])


def _framed(caption: str, config: DataConfig) -> str:
    """The caption between prefix and suffix, with the trigger word."""
    joint = "" if config.caption_suffix.lstrip().startswith(tuple(_PUNCTUATION)) else " "
    text = " ".join(f"{config.caption_prefix} {caption}{joint}{config.caption_suffix}".split())
    word = config.trigger_word
    if not word:
        return text
    if TRIGGER in text:
        return text.replace(TRIGGER, word)
    has_word = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
    return text if has_word else ", ".join(part for part in (word, text) if part)

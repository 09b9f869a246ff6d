"""Tokenizers of the real classes whose vocabularies of a few hundred tokens are written here; and two real ones.

- A word of `WORDS` is one token and any other word is split into letters: captions differ in length, and long ones are
  truncated at the limit.
- Special tokens, their order in the vocabulary and what is added around a text are the real tokenizers'.
"""

import json
import string
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

TEXT = """a an of two on photo picture dogs cat that
system Describe the image by detailing color shape size texture quantity text spatial relationships objects and
background user assistant
You are designed to generate superior images with degree alignment based textual prompts or Prompt Start
video following aspects main content theme Actions events behaviors temporal physical movement changes environment light
style atmosphere camera angles movements transitions used in helpful
"""
"""Words of captions, of the templates of Qwen-Image and HunyuanVideo, and of Lumina's system prompt."""
WORDS = TEXT.split()
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def clip_tokenizer() -> Any:
    """CLIPTokenizer: byte pairs in lower case, a mark at the end of a word, 77 tokens at most."""
    from transformers import CLIPTokenizer

    merges = trained_merges(*(word.lower() for word in WORDS), end="</w>")
    symbols = [*BYTES, *(f"{byte}</w>" for byte in BYTES)]
    vocabulary = numbered(symbols, map("".join, merges), ["<|startoftext|>", "<|endoftext|>"])
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def t5_tokenizer() -> Any:
    """T5Tokenizer, which UMT5 uses too: the likeliest pieces, an end token, 512 tokens at most."""
    from transformers import T5Tokenizer

    words = [(f"▁{word}", -2.0) for word in WORDS]
    letters = [(letter, -5.0) for letter in ("▁", *string.printable.strip())]
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    extra = [(f"<extra_id_{i}>", 0.0) for i in (1, 0)]
    return T5Tokenizer(vocab=[*special, *words, *letters, *extra], extra_ids=2, model_max_length=512)


def gemma_tokenizer() -> Any:
    """GemmaTokenizer: byte pairs of letters, bytes for what is no letter, a token before the text."""
    from transformers import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = trained_merges(*(f"▁{word}" for word in WORDS))
    vocabulary = numbered(special, ["▁", *string.printable.strip()], map("".join, merges))
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's chat template, without tools."""


def qwen_tokenizer() -> Any:
    """Qwen2Tokenizer: byte pairs that begin with the space before a word."""
    from transformers import Qwen2Tokenizer

    merges = trained_merges(*WORDS, *(f"Ġ{word}" for word in WORDS))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    special.append("<|video_pad|>")
    tokenizer = Qwen2Tokenizer(
        vocab=numbered(BYTES, map("".join, merges), special),
        merges=merges,
        eos_token="<|im_end|>",
        padding_side="right",
    )
    tokenizer.chat_template = CHAT
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    return tokenizer


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""The chat template of Qwen3, for one message of a user that an answer follows."""
INSTRUCTIONS = (
    "<s>{% for message in messages %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ message.content[0].text }}[/INST]{% endif %}{% endfor %}"
)
"""The chat template of Mistral, for messages of one text each."""


def qwen3_tokenizer() -> Any:
    """Qwen2Tokenizer with a chat template."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = THINKING
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def mistral_tokenizer() -> Any:
    """A tokenizer of byte pairs with Mistral's tokens for instructions, which pads on the left."""
    from transformers import PreTrainedTokenizerFast

    merges = trained_merges(*WORDS, *(f"Ġ{word}" for word in WORDS))
    special = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    model: Any = Tokenizer(models.BPE(vocab=numbered(special, BYTES, map("".join, merges)), merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=special[4:],
        padding_side="left",
    )
    tokenizer.chat_template = INSTRUCTIONS
    return tokenizer


def llama_tokenizer() -> Any:
    """LlamaTokenizer with the special tokens of Llama 3: byte pairs of letters, padded on the right."""
    from transformers import LlamaTokenizer

    special = ["<s>", "</s>", "<unk>", "<pad>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    merges = trained_merges(*(f"▁{word}" for word in WORDS))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = numbered(special, bytes_, ["▁", *string.printable.strip()], map("".join, merges))
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges, pad_token="<pad>", padding_side="right")
    tokenizer.add_special_tokens({"additional_special_tokens": special[4:]})
    return tokenizer


def llava_tokenizer() -> Any:
    """LlamaTokenizer that knows images; that token is the sixth of HunyuanVideo's template, as in the real one."""
    tokenizer = llama_tokenizer()
    tokenizer.add_bos_token = True
    tokenizer.add_tokens(["<image>", "system", "assistant", "\n\n"], special_tokens=True)
    return tokenizer


def llama3_tokenizer() -> Any:
    """Llama 3's: byte pairs, a token before the text, none for padding."""
    from transformers import PreTrainedTokenizerFast

    merges = trained_merges(*WORDS, *(f"Ġ{word}" for word in WORDS))
    special = ["<|begin_of_text|>", "<|eot_id|>"]
    model: Any = Tokenizer(models.BPE(vocab=numbered(BYTES, map("".join, merges), special), merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    begin = [(special[0], model.token_to_id(special[0]))]
    model.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=begin)
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token=special[0], eos_token=special[1])


def real_tokenizers(folder: Path) -> tuple[Any, Any]:
    """CLIP's and T5's tokenizers with their real vocabularies, from a folder."""
    from transformers import CLIPTokenizer, T5Tokenizer

    clip = CLIPTokenizer.from_pretrained(folder / "clip", model_max_length=77)
    return clip, T5Tokenizer.from_pretrained(folder / "t5")


def numbered(*groups: Iterable[str]) -> dict[str, int]:
    tokens = dict.fromkeys(token for group in groups for token in group)
    return {token: number for number, token in enumerate(tokens)}


@cache
def trained_merges(*words: str, end: str | None = None) -> Any:
    """The byte pairs that make one token of each word; `end` marks the last letter of a word."""
    tokenizer: Any = Tokenizer(models.BPE())
    options: dict[str, Any] = {}
    if end is not None:  # the trainer would number letters with a mark in an order that changes: they come first
        options = {"end_of_word_suffix": end, "special_tokens": sorted({f"{word[-1]}{end}" for word in words})}
    trainer: Any = trainers.BpeTrainer(vocab_size=9999, show_progress=False, **options)  # more than there are pairs
    tokenizer.train_from_iterator(words, trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]

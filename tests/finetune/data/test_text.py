"""Texts of different lengths."""

import torch

from tread.finetune.families.ragged_text import cut, masked_prompt, padded


def test_what_is_cut_and_padded_again_is_the_same_but_for_the_padding() -> None:
    embeds = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    texts = cut(embeds, mask)
    assert [tuple(text.shape) for text in texts] == [(2, 2), (4, 2), (1, 2)]
    again, found = padded(texts)
    assert torch.equal(again, (embeds * mask[..., None])[:, :4])
    assert torch.equal(found, mask[:, :4])


def test_what_is_cut_lets_go_of_the_padding() -> None:
    (text,) = cut(torch.zeros(1, 300, 8), torch.arange(300)[None] < 4)
    assert text.untyped_storage().nbytes() == 4 * 8 * 4


def test_a_prompt_and_what_it_is_led_away_from_have_one_length() -> None:
    arguments = masked_prompt(torch.ones(2, 3), torch.ones(4, 3))
    assert {name: tuple(value.shape) for name, value in arguments.items()} == {
        "prompt_embeds": (1, 4, 3),
        "prompt_attention_mask": (1, 4),
        "negative_prompt_embeds": (1, 4, 3),
        "negative_prompt_attention_mask": (1, 4),
    }
    assert arguments["prompt_attention_mask"].tolist() == [[1, 1, 0, 0]]
    assert masked_prompt(torch.ones(2, 3), None).keys() == {"prompt_embeds", "prompt_attention_mask"}

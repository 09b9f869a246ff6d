"""Forced tokens: where they are at either end, beside a force mask, and in the budget."""

import pytest
import torch

from tread import ConfigError, Handle, RoutePlan
from tread.routing.budget import kept_count
from tread.routing.mode import Forced

SCORE = torch.zeros(2, 6, dtype=torch.int64)
MASK = torch.tensor([[False, True, False, False], [False, False, False, True]])


@pytest.mark.parametrize(
    ("forced", "mask", "expected"),
    [
        (Forced(), None, None),
        (Forced(references=2), None, ["....##", "....##"]),
        (Forced(references=2, references_at="first"), None, ["##....", "##...."]),
        (Forced(pinned=1), None, ["#.....", "#....."]),
        (Forced(references=2), MASK, [".#..##", "...###"]),
        (Forced(references=2, references_at="first"), MASK, ["##.#..", "##...#"]),
        (Forced(references=2, pinned=1), MASK, ["##..##", "#..###"]),
    ],
    ids=["none", "last", "first", "pinned", "last-mask", "first-mask", "all"],
)
def test_a_mask_covers_all_but_references(forced: Forced, mask: torch.Tensor | None, expected: list[str] | None):
    found = forced.with_mask(mask, like=SCORE)
    assert (found if found is None else ["".join(".#"[token] for token in row) for row in found]) == expected


def test_a_forward_keeps_them_and_drops_of_the_rest():
    handle = Handle(RoutePlan.from_config("paper"), depth=12)
    forced = Forced(references=16, pinned=8)
    kept = torch.zeros(4, 64, dtype=torch.bool)
    handle.begin(training=True, forced=forced).enter(2, torch.randn(4, 64, 8))
    kept = kept.scatter(1, handle.selections[0], True)
    assert kept[:, :8].all()
    assert kept[:, -16:].all()
    assert kept.sum(1).tolist() == [64 - (64 - 16 - 8) // 2] * 4
    with handle.force_keep(torch.zeros(4, 64, dtype=torch.bool)), pytest.raises(ConfigError, match="of 48 tokens"):
        handle.begin(training=True, forced=forced).enter(2, torch.randn(4, 64, 8))


def test_a_mask_of_an_empty_batch_is_refused():
    """Its largest count would be an error of torch's."""
    handle, mask = Handle(RoutePlan.from_config("paper"), depth=12), torch.zeros(0, 64, dtype=torch.bool)
    sentence = r"^force_keep has shape \(0, 64\), an empty batch; it needs at least one sample\.$"
    with pytest.raises(ConfigError, match=sentence), handle.force_keep(mask):
        pass


def test_pinned_tokens_that_a_mask_names_too_are_counted_once():
    """In every sample; where a mask names fewer of them, only those."""
    handle = Handle(RoutePlan.from_config("paper"), depth=12)
    mask = torch.zeros(2, 64, dtype=torch.bool)
    mask[:, :8] = True
    mask[1, 20:24] = True
    for pinned, forced in ((8, 12), (16, 20), (4, 12), (0, 12)):
        with handle.force_keep(mask):
            handle.begin(training=True, forced=Forced(pinned=pinned)).enter(2, torch.randn(2, 64, 8))
        kept = torch.zeros(2, 64, dtype=torch.bool).scatter(1, handle.selections[0], True)
        assert kept[:, :pinned].all()
        assert kept[mask].all()
        assert kept.sum(1).tolist() == [kept_count(64, 0.5, forced)] * 2

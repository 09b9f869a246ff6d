"""A state on a joined stream, against lists: the rows a layer sees, what it leaves, and the side inputs that follow."""

import pytest
import torch
from torch import Tensor

from tread import ConfigError, Route
from tread.routing.state import End, State

TEXT, IMAGE = 3, 6
IDS = torch.tensor([[0, 2, 5], [1, 3, 4]])
"""The kept image tokens of two samples."""
X = torch.arange(2.0 * (TEXT + IMAGE) * 2).view(2, TEXT + IMAGE, 2)
WINDOW = (Route(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=2),)
LAYOUTS: dict[str, tuple[End, Tensor | None, list[list[int]]]] = {
    "last": ("last", None, [[3, 4, 5, 6, 7, 8]] * 2),
    "first": ("first", None, [[0, 1, 2, 3, 4, 5]] * 2),
    "from an index": ("last", torch.tensor([2, 0]), [[2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]]),
    "between others": (
        "last",
        torch.tensor([[0, 1, 3, 4, 6, 8], [1, 2, 3, 5, 7, 8]]),
        [[0, 1, 3, 4, 6, 8], [1, 2, 3, 5, 7, 8]],
    ),
}
"""The end that is passed on, the offset, and the index of each image token in the stream."""
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def rows_of(image: list[list[int]], ids: Tensor = IDS) -> list[list[int]]:
    """The indices of the stream that stay: all but those of the dropped image tokens."""
    rows = []
    for at, kept in zip(image, ids.tolist(), strict=True):
        dropped = {at[token] for token in range(IMAGE) if token not in kept}
        rows.append([token for token in range(TEXT + IMAGE) if token not in dropped])
    return rows


def taken(x: Tensor, rows: list[list[int]]) -> Tensor:
    return torch.stack([sample[row] for sample, row in zip(x, rows, strict=True)])


def opened(layout: str, *, per_block: bool = False) -> tuple[State, Tensor]:
    """A state inside its window, and the stream of layer 1."""
    end, offset, image = LAYOUTS[layout]
    seen: list[Tensor] = []

    def select(route: int, tokens: Tensor) -> Tensor:
        seen.append(tokens)
        return IDS

    state = State(WINDOW, select, tokens=IMAGE, offset=offset, per_block=per_block)
    assert state.enter(0, X, end) is X
    assert state.exit(0, X, end) is X
    assert not state.inside
    short = state.enter(1, X, end)
    assert state.inside
    assert [tokens.tolist() for tokens in seen] == [taken(X, image).tolist()], "selected by the image tokens, once"
    return state, short


@every_layout
def test_a_window_sees_the_kept_rows_and_leaves_the_others(layout: str):
    end, _, image = LAYOUTS[layout]
    rows = rows_of(image)
    state, short = opened(layout)
    assert short.equal(taken(X, rows))
    inner = state.exit(1, -short, end)
    assert inner.equal(-short), "carried to the next layer"
    assert state.enter(2, inner, end) is inner
    full = state.exit(2, inner - 1, end)
    for b in range(2):
        for token in range(TEXT + IMAGE):
            assert full[b, token].equal(-X[b, token] - 1 if token in rows[b] else X[b, token])
    assert not state.inside
    assert state.enter(3, full, end) is full


@every_layout
def test_per_block_gives_every_layer_the_full_stream(layout: str):
    end, _, image = LAYOUTS[layout]
    rows = rows_of(image)
    state, short = opened(layout, per_block=True)
    full = state.exit(1, -short, end)
    assert full.shape == X.shape
    between = full + 100  # what the model adds between its layers reaches dropped tokens too
    short = state.enter(2, between, end)
    assert short.equal(taken(between, rows))
    full = state.exit(2, short * 2, end)
    for b in range(2):
        for token in range(TEXT + IMAGE):
            assert full[b, token].equal((100 - X[b, token]) * 2 if token in rows[b] else X[b, token] + 100)


@every_layout
@pytest.mark.parametrize("per_block", [False, True], ids=["carry", "per block"])
def test_a_skipped_last_layer_closes_the_window_at_the_next(layout: str, per_block: bool):
    end, _, image = LAYOUTS[layout]
    rows = rows_of(image)
    state, short = opened(layout, per_block=per_block)
    x = state.enter(3, state.exit(1, -short, end), end)
    for b in range(2):
        for token in range(TEXT + IMAGE):
            assert x[b, token].equal(-X[b, token] if token in rows[b] else X[b, token])
    assert not state.inside
    assert state.bypass is None


@every_layout
def test_side_inputs_follow_on_any_axis(layout: str):
    end, _, image = LAYOUTS[layout]
    rows = rows_of(image)
    state, _ = opened(layout)
    length = TEXT + IMAGE
    table, heads, shared = torch.randn(length, 4), torch.randn(2, 5, length, 4), torch.randn(1, length, 4)
    alone = torch.randn(2, IMAGE, 4)  # the image tokens' own
    assert state.side("table", table, image=end).equal(taken(torch.stack([table] * 2), rows))  # pyright: ignore
    expected = taken(heads.transpose(1, 2), rows).transpose(1, 2)
    assert state.side("heads", heads, dim=2, image=end).equal(expected)  # pyright: ignore
    assert state.side("shared", shared, dim=1, image=end).equal(taken(shared.expand(2, -1, -1), rows))  # pyright: ignore
    assert state.side("alone", alone, dim=1, image=end).equal(taken(alone, IDS.tolist()))  # pyright: ignore
    assert state.dropped == 3


def test_a_side_input_may_have_others_on_both_sides_of_the_image():
    state, _ = opened("last")
    table = torch.arange(TEXT + IMAGE)
    rows = state.side("ids", table, image=1)
    assert rows is not None
    assert rows.tolist() == [[0, 1, 3, 6, 7, 8], [0, 2, 4, 5, 7, 8]]


@pytest.mark.parametrize(("layout", "stays"), [("last", slice(0, 6)), ("first", slice(3, 9))])
def test_a_side_input_equal_for_all_image_tokens_is_narrowed(layout: str, stays: slice):
    state, _ = opened(layout)
    mask = torch.arange(2 * 9).view(2, 9)
    assert state.shortened("mask", mask, 1, LAYOUTS[layout][0]).equal(mask[:, stays])
    assert State().shortened("mask", mask, 1, "last") is mask


@pytest.mark.parametrize("end", ["last", "first"])
def test_text_that_joins_inside_a_window_stays(end: End):
    x, text = X[:, :IMAGE], torch.full((2, TEXT, 2), -7.0)
    state = State(WINDOW, lambda route, tokens: IDS)
    short = state.enter(1, x, end)
    assert short.equal(taken(x, IDS.tolist()))
    joined = (text, -short) if end == "last" else (-short, text)
    full = state.exit(2, torch.cat(joined, dim=1), end)
    restored = x.clone()
    for b, kept in enumerate(IDS.tolist()):
        restored[b, kept] *= -1
    assert full.equal(torch.cat((text, restored) if end == "last" else (restored, text), dim=1))


@every_layout
def test_tokens_in_another_order_trade_their_indices(layout: str):
    """With every token kept, the rows are the dense ones in the order of the selection; the others stay."""
    end, offset, image = LAYOUTS[layout]
    ids = torch.tensor([[2, 0, 1, 5, 4, 3], [5, 4, 3, 2, 1, 0]])
    state = State(WINDOW, lambda route, tokens: ids, tokens=IMAGE, offset=offset)
    rows = [list(range(TEXT + IMAGE)) for _ in range(2)]
    for row, at, order in zip(rows, image, ids.tolist(), strict=True):
        for token, source in zip(at, order, strict=True):
            row[token] = at[source]
    short = state.enter(1, X, end)
    assert short.equal(taken(X, rows))
    assert state.exit(2, short, end).equal(X)


def test_a_stream_shorter_than_its_image_is_refused():
    state = State(WINDOW, lambda route, tokens: IDS, tokens=IMAGE)
    message = r"^the stream has 5 tokens, fewer than the 6 image tokens said to be in it\.$"
    with pytest.raises(ConfigError, match=message):
        state.enter(1, X[:, :5])

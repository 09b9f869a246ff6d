"""Each layer against its formula, written out independently."""

import math
import warnings
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tread.models.layers import (
    Attention,
    Block,
    GeluMlp,
    HeadNorm,
    SwigluMlp,
    TimeEmbedding,
    patchify,
    rope_positions,
    rotate,
    sincos_positions,
    unpatchify,
)
from tread.models.sizes import SIZES, model_size


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_patchify_cuts_row_by_row_and_unpatchify_undoes_it():
    x = torch.randn(2, 3, 4, 6)
    tokens = patchify(x, 2)
    assert tokens.shape == (2, 6, 12)
    for row, column in product(range(2), range(3)):
        cut = x[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]  # (B, C, p, p)
        assert torch.equal(tokens[:, 3 * row + column], cut.permute(0, 2, 3, 1).flatten(1))
    assert torch.equal(unpatchify(tokens, 2, (2, 3)), x)


def test_sincos_positions_of_a_non_square_grid():
    height, width, channels = 3, 5, 16
    table = sincos_positions((height, width), channels)
    quarter = channels // 4
    for row, column in product(range(height), range(width)):
        frequencies = [10_000 ** (-i / quarter) for i in range(quarter)]
        expected = [
            wave(position * frequency)
            for position in (column, row)
            for wave in (math.sin, math.cos)
            for frequency in frequencies
        ]
        torch.testing.assert_close(table[row * width + column], torch.tensor(expected))
    assert torch.cdist(table, table).fill_diagonal_(1).min() > 0.1, "two tokens share a position"


def _complex_turn(x: Tensor, row: int, column: int) -> Tensor:
    """RoPE by its definition: channel pairs as complex numbers, multiplied by e^(i m theta)."""
    half, quarter = len(x) // 2, len(x) // 4
    theta = torch.tensor([100 ** (-i / quarter) for i in range(quarter)])
    angle = torch.cat([row * theta, column * theta])
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angle)
    return torch.cat([turned.real, turned.imag])


def test_rotate_is_complex_multiplication_on_each_axis():
    grid = (3, 4)
    x = torch.randn(2, 2, 12, 8)
    turned = rotate(x, rope_positions(grid, 8))
    for sample, head, row, column in product(range(2), range(2), range(3), range(4)):
        token = row * 4 + column
        expected = _complex_turn(x[sample, head, token], row, column)
        torch.testing.assert_close(turned[sample, head, token], expected)


def test_rotated_products_depend_on_the_offset_only():
    query, key = torch.randn(8), torch.randn(8)
    grid = (5, 7)
    table = rope_positions(grid, 8)
    q = rotate(query.expand(1, 1, 35, 8), table)[0, 0].unflatten(0, grid)
    k = rotate(key.expand(1, 1, 35, 8), table)[0, 0].unflatten(0, grid)
    products = [q[row, column] @ k[row + 1, column + 2] for row, column in product(range(4), range(5))]
    torch.testing.assert_close(torch.stack(products), products[0].expand(len(products)))
    assert (q[0, 0] @ k[2, 1] - products[0]).abs() > 1e-3, "the two axes cannot be told apart"


def test_rotate_with_a_table_per_sample_follows_the_selection():
    x = torch.randn(2, 3, 12, 8)
    table = rope_positions((3, 4), 8)
    ids = torch.tensor([[0, 3, 7, 11], [1, 2, 5, 6]])
    selected = torch.stack([x[sample][:, ids[sample]] for sample in range(2)])  # (B, heads, K, head_size)
    expected = torch.stack([rotate(x, table)[sample][:, ids[sample]] for sample in range(2)])
    assert torch.equal(rotate(selected, table[ids]), expected)


def test_time_embedding_against_its_formula():
    embed = TimeEmbedding(4)
    times = [0.0, 0.25, 3.0, 999.0]
    frequencies = [math.exp(-math.log(10_000) * i / 128) for i in range(128)]
    waves = torch.tensor([[wave(t * f) for wave in (math.cos, math.sin) for f in frequencies] for t in times])
    hidden = waves @ embed.fc1.weight.T + embed.fc1.bias
    expected = (hidden * hidden.sigmoid()) @ embed.fc2.weight.T + embed.fc2.bias
    torch.testing.assert_close(embed(torch.tensor(times)), expected)


def test_time_embedding_tells_late_times_apart_in_low_precision():
    embed = TimeEmbedding(8).bfloat16()
    early, late = embed(torch.tensor([999, 1000]))
    assert early.dtype == torch.bfloat16
    assert not torch.equal(early, late)


def test_head_norm_against_its_formula():
    x = torch.randn(2, 5, 16) * 3 + 1
    rms = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    head = HeadNorm(16)
    nn.init.normal_(head.weight)
    torch.testing.assert_close(head(x), rms * head.weight)


def test_head_norm_keeps_the_type_under_autocast_without_warning():
    head = HeadNorm(16).float()
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert head(torch.randn(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("modern", [False, True])
def test_attention_against_a_written_out_softmax(modern: bool):
    attn = Attention(16, 2, qk_norm=modern)
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 6, 16)
    rope = rope_positions((2, 3), 8) if modern else None
    out = []
    q, k, v = (attn.qkv(x)[..., 16 * i : 16 * i + 16] for i in range(3))
    for head in range(2):
        channels = slice(8 * head, 8 * head + 8)
        qh, kh = attn.q_norm(q[..., channels]), attn.k_norm(k[..., channels])
        if rope is not None:
            qh, kh = rotate(qh[:, None], rope)[:, 0], rotate(kh[:, None], rope)[:, 0]
        weights = (qh @ kh.transpose(1, 2) / math.sqrt(8)).softmax(-1)
        out.append(weights @ v[..., channels])
    torch.testing.assert_close(attn(x, rope), attn.proj(torch.cat(out, -1)))


def test_gelu_mlp_uses_the_tanh_form():
    mlp = GeluMlp(8, 4.0)
    x = torch.randn(2, 3, 8)
    h = mlp.fc1(x)
    gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    torch.testing.assert_close(mlp(x), mlp.fc2(gelu))


def test_swiglu_mlp_against_its_formula():
    mlp = SwigluMlp(24, 4.0)
    x = torch.randn(2, 3, 24)
    hidden = mlp.fc2.in_features
    assert hidden == 64
    w, v = mlp.fc1.weight[:hidden], mlp.fc1.weight[hidden:]
    gate = x @ w.T
    expected = ((gate * torch.sigmoid(gate)) * (x @ v.T)) @ mlp.fc2.weight.T
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("width", sorted({model_size(name)["width"] for name in SIZES}))
def test_swiglu_has_the_parameters_of_gelu(width: int):
    counts = [sum(p.numel() for p in kind(width, 4.0).to("meta").parameters()) for kind in (GeluMlp, SwigluMlp)]
    assert counts[1] == pytest.approx(counts[0], rel=0.03)
    assert SwigluMlp(width, 4.0).fc2.in_features % 8 == 0


@pytest.mark.parametrize("modern", [False, True])
def test_a_block_does_not_care_in_which_order_tokens_come(modern: bool):
    if modern:
        block = Block(16, 2, mlp_ratio=4.0, qk_norm=True, norm="rms", mlp="swiglu")
    else:
        block = Block(16, 2, mlp_ratio=4.0, qk_norm=False, norm="layer", mlp="gelu")
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, c = torch.randn(2, 6, 16), torch.randn(2, 16)
    rope = rope_positions((2, 3), 8) if modern else None
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    out = block(x, c, rope)
    torch.testing.assert_close(block(x[:, order], c, None if rope is None else rope[order]), out[:, order])
    assert (out - x).abs().max() > 0.1, "the block is the identity and the test proves nothing"

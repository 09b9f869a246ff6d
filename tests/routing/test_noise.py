"""The hash noise: uniform, independent, and the same wherever it is computed."""

import pytest
import torch

from tread.routing import noise

N = 1 << 16
INDEX = torch.arange(N)


def reference_bits(*words: int) -> int:
    """The same hash in plain Python integers, written out once more from its description."""
    state = 0x1E3779B9

    def scramble(h: int) -> int:
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (16, 0x31848BAB)):
            h = ((h ^ h >> shift) * factor) % 2**32
        return h ^ h >> 15

    for word in words:
        while True:
            state = scramble(state ^ word % 2**32)
            word //= 2**32
            if not word:
                break
        state = (state + 0x1E3779B9) % 2**32
    return scramble(state)


def test_tensors_and_python_integers_agree():
    got = noise.bits(2**40 + 3, torch.tensor(5), 1, torch.arange(3)[:, None], torch.arange(4))
    expected = [[reference_bits(2**40 + 3, 5, 1, i, j) for j in range(4)] for i in range(3)]
    assert got.tolist() == expected


def test_uniform_fills_its_interval_evenly():
    u = noise.uniform(0, INDEX)
    assert u.dtype == torch.float32
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    counts = torch.histc(u, 256, 0, 1)
    chi2 = ((counts - N / 256) ** 2 / (N / 256)).sum()
    assert 180 < chi2 < 340, "255 degrees of freedom: mean 255, standard deviation 22.6"


def test_every_bit_is_fair_and_every_input_bit_moves_half_of_them():
    base = noise.bits(0, INDEX)
    for out in range(32):
        assert abs((base >> out & 1).float().mean() - 0.5) < 0.01
    for bit in range(20):
        flipped = base ^ noise.bits(0, INDEX ^ (1 << bit))
        moved = torch.stack([(flipped >> out & 1).float().mean() for out in range(32)])
        assert (moved - 0.5).abs().max() < 0.02, f"input bit {bit}"


@pytest.mark.parametrize("axis", range(4))
def test_neighbouring_words_are_independent(axis):
    """Seed, step, sample, route: moving any of them by one gives an uncorrelated stream."""
    words = [3, 1000, 17, 0]
    moved = words.copy()
    moved[axis] += 1
    a, b = noise.uniform(*words, INDEX), noise.uniform(*moved, INDEX)
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.02
    joint = torch.histogramdd(torch.stack([a, b], 1), bins=[16, 16], range=[0, 1, 0, 1]).hist
    chi2 = ((joint - N / 256) ** 2 / (N / 256)).sum()
    assert 180 < chi2 < 340
    lagged = torch.corrcoef(torch.stack([a[1:], b[:-1]]))[0, 1]
    assert abs(lagged) < 0.02


def test_swapped_words_differ():
    assert not noise.bits(0, 1, INDEX).equal(noise.bits(1, 0, INDEX))


def test_normal_has_the_moments_of_a_gaussian():
    z = noise.normal(7, INDEX).double()
    assert abs(z.mean()) < 0.02
    assert abs(z.var() - 1) < 0.03
    assert abs((z**4).mean() - 3) < 0.15
    assert 3.5 < z.abs().max() < 6


def test_eager_and_compiled_are_identical():
    step = torch.tensor(12345)
    compiled = torch.compile(noise.bits, fullgraph=True, backend="inductor")
    assert compiled(9, step, INDEX).equal(noise.bits(9, step, INDEX))


def test_two_uniforms_are_two_uniforms():
    first, second = noise.two_uniforms(2**40 + 3, INDEX[:, None][:9], 5, INDEX[:7])
    assert first.equal(noise.uniform(2**40 + 3, INDEX[:, None][:9], 5, INDEX[:7], 0))
    assert second.equal(noise.uniform(2**40 + 3, INDEX[:, None][:9], 5, INDEX[:7], 1))
    radius = torch.sqrt(-2 * torch.log(noise.uniform(3, INDEX, 0)))
    assert noise.normal(3, INDEX).equal(radius * torch.cos(2 * torch.pi * noise.uniform(3, INDEX, 1)))


def test_a_permutation_sorts_the_hashes():
    order = noise.permutation(1000, 3, 5)
    assert order.tolist() == sorted(range(1000), key=lambda index: reference_bits(3, 5, index))
    assert sorted(order.tolist()) == list(range(1000))


def test_noise_of_a_sample_depends_on_its_own_words_alone():
    index = torch.tensor([7, 2, 7])
    alike = noise.per_sample_normal(3, index, (2, 4), 11)
    assert alike.shape == (3, 2, 4)
    for sample, row in zip(index.tolist(), alike, strict=True):
        assert row.equal(noise.normal(3, sample, 11, torch.arange(8)).view(2, 4))
    seeds = torch.tensor([3, 3, 4])
    each = noise.per_sample_normal(seeds, index, (2, 4), 11)
    assert each[:2].equal(alike[:2])
    assert each[2].equal(noise.normal(4, 7, 11, torch.arange(8)).view(2, 4))
    assert noise.per_sample_normal(3, index.to("meta"), (2, 4)).device.type == "meta"


def test_global_rng_is_left_alone():
    before = torch.get_rng_state()
    noise.normal(1, INDEX)
    assert torch.get_rng_state().equal(before)


@pytest.mark.gpu
def test_gpu_gives_the_same_bits():
    assert noise.bits(9, torch.tensor(5), INDEX.cuda()).cpu().equal(noise.bits(9, torch.tensor(5), INDEX))

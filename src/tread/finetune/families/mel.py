"""Log-mel spectrograms, the input of audio autoencoders.

The spectrogram is the magnitude of a centred STFT with a Hann window; the mel scale and its area normalisation are
Slaney's, from 0 to half the sampling rate, as in the training of LTX-2's autoencoder.
"""

from functools import lru_cache

import torch
from torch import Tensor

WINDOW = 1024
"""Samples per STFT window (n_fft)."""
FLOOR = 1e-5
"""Magnitudes are clamped to this before the logarithm."""


def log_mel(waveform: Tensor, *, rate: int, hop: int, bands: int) -> Tensor:
    """Waveform (B, channels, N) -> log-mel spectrogram (B, channels, 1 + N // hop, bands), float32."""
    sound = waveform.float().flatten(0, 1)  # (B channels, N)
    window = torch.hann_window(WINDOW, device=sound.device)
    spectrum = torch.stft(sound, WINDOW, hop, window=window, center=True, return_complex=True).abs()  # (., bins, T)
    mel = _filters(rate, bands).to(sound.device) @ spectrum  # (., bands, T)
    return mel.clamp(min=FLOOR).log().transpose(1, 2).unflatten(0, waveform.shape[:2])


@lru_cache
def _filters(rate: int, bands: int) -> Tensor:
    """The mel filter bank, (bands, bins)."""
    from transformers.audio_utils import mel_filter_bank

    found = mel_filter_bank(WINDOW // 2 + 1, bands, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(found).T.float()

"""Gaussian data of several classes, for which denoiser, velocity and ODE solutions are known in closed form."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tread.objectives import EDM, Net


@dataclass(frozen=True)
class Gaussian:
    """Class c is N(means[c], cov); a sample is (C, 1, 1). Everything is computed in float64."""

    means: Tensor  # (classes, C)
    cov: Tensor  # (C, C)

    # EDM: x = data + sigma * noise
    def denoise(self, x: Tensor, sigma: float, labels: Tensor) -> Tensor:
        mean, eye = self.means[labels], torch.eye(len(self.cov), dtype=torch.float64)
        gain = self.cov @ torch.linalg.inv(self.cov + sigma**2 * eye)
        return (mean + (x.flatten(1) - mean) @ gain.T)[..., None, None]

    def edm_field(self, x: Tensor, level: float, labels: Tensor) -> Tensor:
        return (x - self.denoise(x, level, labels)) / level

    def edm_net(self, edm: EDM) -> Net:
        """The network whose preconditioned denoiser is the optimal one."""

        def net(x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
            sigma = math.exp(4 * time[0].item() / 1000)
            total = sigma**2 + edm.sigma_data**2
            state = x.double() * math.sqrt(total)
            best = self.denoise(state, sigma, labels)
            raw = (best - edm.sigma_data**2 / total * state) * math.sqrt(total) / (sigma * edm.sigma_data)
            return raw.to(x.dtype)

        return net

    def edm_solution(self, x: Tensor, sigma: float, labels: Tensor) -> Tensor:
        """Where the ODE carries x from sigma to 0: each principal axis shrinks with its own spread."""
        variances, axes = torch.linalg.eigh(self.cov)
        mean = self.means[labels]
        shrink = (variances / (variances + sigma**2)).sqrt()
        return (mean + ((x.flatten(1) - mean) @ axes * shrink) @ axes.T)[..., None, None]

    # Flow: x = (1 - t) * data + t * noise
    def flow_field(self, x: Tensor, level: float, labels: Tensor) -> Tensor:
        mean, eye = self.means[labels], torch.eye(len(self.cov), dtype=torch.float64)
        spread = (1 - level) ** 2 * self.cov + level**2 * eye
        gain = (level * eye - (1 - level) * self.cov) @ torch.linalg.inv(spread)
        return (-mean + (x.double().flatten(1) - (1 - level) * mean) @ gain.T)[..., None, None]

    def flow_net(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        return self.flow_field(x, time[0].item() / 1000, labels).to(x.dtype)

    def flow_solution(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Where the ODE carries noise from t = 1 to 0."""
        variances, axes = torch.linalg.eigh(self.cov)
        return (self.means[labels] + (noise.flatten(1) @ axes * variances.sqrt()) @ axes.T)[..., None, None]


def three_classes() -> Gaussian:
    factor = torch.tensor([[0.6, 0.0, 0.0], [0.5, 0.4, 0.0], [-0.3, 0.2, 1.1]], dtype=torch.float64)
    means = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0], [0.2, 0.1, -0.4]], dtype=torch.float64)
    return Gaussian(means, factor @ factor.T)

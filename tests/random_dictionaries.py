"""Dictionaries for tests, with random weights."""

import torch
from torch import Tensor, nn


class RandomDictionary(nn.Module):
    """A sparse autoencoder with ReLU features and random weights."""

    def __init__(self, width: int, n_features: int = 24, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.encoder = nn.Parameter(torch.randn(width, n_features, generator=generator) / width**0.5)
        self.decoder = nn.Parameter(torch.randn(n_features, width, generator=generator) / n_features**0.5)
        self.bias = nn.Parameter(0.3 * torch.randn(width, generator=generator))

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu((x - self.bias) @ self.encoder)

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.decoder + self.bias


class Rescaling:
    """A dictionary that keeps the norm of what it encodes until it decodes, as SAEs of SAELens do."""

    def encode(self, x: Tensor) -> Tensor:
        self.norm = x.norm(dim=-1, keepdim=True)
        return torch.relu(x / self.norm)

    def decode(self, features: Tensor) -> Tensor:
        reconstruction = features * self.norm
        del self.norm
        return reconstruction


class InPlace:
    """A dictionary whose methods write into what they get."""

    def encode(self, x: Tensor) -> Tensor:
        return x.sub_(1).relu_()

    def decode(self, features: Tensor) -> Tensor:
        return features.mul_(0.5).add_(1)


class Identity(nn.Module):
    """A dictionary that loses nothing."""

    def encode(self, x: Tensor) -> Tensor:
        return x

    def decode(self, features: Tensor) -> Tensor:
        return features


class Zero(Identity):
    """A dictionary whose reconstruction is zero."""

    def decode(self, features: Tensor) -> Tensor:
        return torch.zeros_like(features)

"""Complex dtypes, conjugate and negative views, and Fourier transforms."""

from __future__ import annotations

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 6


class ComplexBlock(nn.Module):
    """A complex linear layer, then an activation of the modulus."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, z: Tensor) -> Tensor:
        # conj() and .imag of a conjugate are lazy: the tensors carry a conjugate or a negative bit.
        z = z @ self.weight + 0.1 * z.conj() * z.conj().imag.tanh()
        modulus = z.abs()
        return z * torch.relu(modulus + self.bias) / (modulus + 1e-3)


class ComplexNetwork(nn.Module):
    """Complex blocks between view_as_complex and view_as_real."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ComplexBlock(dtype) for _ in range(3)))

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        z = self.blocks(torch.view_as_complex(pairs))
        return torch.view_as_real(z), z.mH


def complex_network(dtype: torch.dtype = torch.complex64) -> Step:
    """Return a complex model on pairs of real numbers that require gradients."""
    real = torch.float32 if dtype == torch.complex64 else torch.float64
    pairs = torch.randn(4, WIDTH, 2, dtype=real, requires_grad=True)

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        real_pairs, adjoint = outputs
        return mean_of_squares(real_pairs) + adjoint.angle().cos().mean()

    return ComplexNetwork(dtype), pairs, loss


class SpectralLayer(nn.Module):
    """A Fourier neural operator's layer: multiply the lowest frequencies, add a pointwise path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(3, 3, 4, dtype=torch.complex64))
        self.local = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        filtered = torch.zeros_like(spectrum)
        filtered[..., :4] = torch.einsum("bik,iok->bok", spectrum[..., :4], self.weight)
        return nn.functional.gelu(torch.fft.irfft(filtered, n=x.shape[-1]) + self.local(x))


def fourier_operator() -> Step:
    """Return three spectral layers on random lines."""
    return nn.Sequential(*(SpectralLayer() for _ in range(3))), torch.randn(2, 3, 11), mean_of_squares


EXAMPLES = (
    Example("complex64", complex_network, has_blocks=True),
    Example("complex128", lambda: complex_network(torch.complex128), has_blocks=True),
    Example("fourier-operator", fourier_operator, has_blocks=True),
)

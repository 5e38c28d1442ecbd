"""Stands in for torchvision, which SGLang imports for images alone."""

from torchvision import io, transforms

__version__ = "0"
__all__ = ["io", "transforms"]

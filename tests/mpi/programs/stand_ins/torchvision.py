"""Stands in for torchvision, which HeAT imports for data sets of images: PyPI's needs the CUDA build of PyTorch."""

from __future__ import annotations

import sys
from types import ModuleType

datasets, transforms = (ModuleType(f"torchvision.{name}") for name in ("datasets", "transforms"))
datasets.MNIST = transforms.Compose = object  # type: ignore[attr-defined]
sys.modules.update({module.__name__: module for module in (datasets, transforms)})

"""PyTorch on compcoll."""

"""Device tensors in, an order between their streams and MPI out. MPI knows nothing of streams."""

import torch
from torch import Tensor


def synchronize_stream(tensor: Tensor) -> None:
    """Waits for the current stream of the tensor's device: MPI must not read before the kernels have written."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()

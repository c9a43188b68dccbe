"""Words of accelerators' drivers and libraries, for rooms that know no torch."""

from __future__ import annotations

MACHINE_FAULTS = ("cuda error", "nccl error", "hip error", "rccl error", "xpu error", "xccl error")
"""In messages of what may pass: a device or a link that is lost."""
PROGRAM_FAULTS = ("device-side assert",)
"""In messages of what the program did, and will do again: an index out of range, found by a kernel."""
ENVIRONMENT_PREFIXES = (
    "CUDA_", "CUDNN_", "CUBLAS_", "FI_", "HIP_", "HSA_", "NCCL_", "NVIDIA_", "OFI_NCCL_", "PYTORCH_", "RCCL_", "ROCR_",
    "UCX_", "ZE_",
)  # fmt: skip
"""How the variables begin that drivers, their collectives and their network plugins (EFA's libfabric: FI_) read."""
DRIVER_LIBRARY = r"lib(?:cuda|nvidia-[\w-]+)\.so\.\d+"
"""File names of a driver's own libraries, which an image takes from the host."""

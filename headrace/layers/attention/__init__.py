"""Attention backends and their contract, registered here with the geometries they support. Imports kernels alone: the
layers stand above."""

from headrace.layers.attention import support
from headrace.layers.attention.contract import ATTENTION_BACKENDS

ATTENTION_BACKENDS.add(
    "reference", "headrace.layers.attention.reference:ReferenceAttention", doc="plain torch, any device and geometry"
)
ATTENTION_BACKENDS.add(
    "cpu", "headrace.layers.attention.cpu:CpuAttention", supports=support.reason_against_cpu, priority=10,
    doc="own C++ kernels, compiled at first use; plain torch until then",
)
ATTENTION_BACKENDS.add(
    "triton", "headrace.layers.attention.triton:TritonAttention", supports=support.reason_against_triton, priority=10,
    doc="own kernels: any geometry on a GPU",
)
ATTENTION_BACKENDS.add(
    "triton_pdl", "headrace.layers.attention.triton:DependentLaunchTritonAttention",
    supports=support.reason_against_dependent_launch,
    priority=5, doc="the same with programmatic dependent launch",
)
ATTENTION_BACKENDS.add(
    "cudnn", "headrace.layers.attention.cudnn:CudnnAttention", supports=support.reason_against_cudnn, priority=20,
    doc="cuDNN's paged attention; needs nvidia-cudnn-frontend",
)
ATTENTION_BACKENDS.add(
    "flashinfer", "headrace.layers.attention.flashinfer:FlashinferAttention",
    supports=support.reason_against_flashinfer,
    priority=1, doc="flashinfer's prefill, on request; needs flashinfer-python, and nvcc to compile it",
)

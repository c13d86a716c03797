"""Kernels of our own in Triton and CUDA C++; each does what a few plain operations do, in one pass.

The plain operations stay beside them in the layers, the sampler and the step: they run on the CPU, and
wherever fusion is off. Triton is imported by the modules of this package alone, which are imported where a
model is built for a GPU.
"""

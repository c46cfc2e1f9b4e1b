"""What Triton kernels need to be launched early; imported with the first kernel."""

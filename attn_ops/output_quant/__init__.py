"""What attention's output may be quantized to, and the quantize kernel that stands alone."""

"""The kernels of BLOCKSPARSE."""

"""What passes ask of a graph: values, sizes, memory, layers, training, rows. A file each."""

"""What passes must know of a graph: rows, shapes, operators."""

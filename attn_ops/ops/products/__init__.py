"""Products of rows with weights, and the norms before them."""

"""What the text of Inductor's output code says: tensors, their sizes, bytes of a call."""

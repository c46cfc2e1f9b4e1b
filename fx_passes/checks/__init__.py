"""What is checked after each pass: a graph keeps its outputs, and its writes in their order."""

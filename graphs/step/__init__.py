"""One step: its tensors, the model's inputs, and what the device does at its end."""

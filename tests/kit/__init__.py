"""What tests make their batches, models and sessions with."""

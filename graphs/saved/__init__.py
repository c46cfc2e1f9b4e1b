"""What was compiled, in a file for the next process."""

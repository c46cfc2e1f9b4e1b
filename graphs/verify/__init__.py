"""What is checked while a session runs: replays against calls, the model against what it was."""

"""Random programs that use a session as its authors did not mean it: see `fuzz_programs`."""

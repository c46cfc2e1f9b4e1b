"""Everything that compiling wrote, as files and an index of them."""

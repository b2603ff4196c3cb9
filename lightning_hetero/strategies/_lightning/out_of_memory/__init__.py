"""A batch that does not fit in the memory of one rank: done again in smaller pieces, with the same gradient."""

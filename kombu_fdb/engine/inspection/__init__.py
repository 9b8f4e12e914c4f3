"""Looking without changing: browsing, pages, counts, by task."""

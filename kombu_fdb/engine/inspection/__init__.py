"""Looking at messages one by one: browsing, pages, counts, by task."""

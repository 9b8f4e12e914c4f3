"""Everything out of a store, and back into another."""

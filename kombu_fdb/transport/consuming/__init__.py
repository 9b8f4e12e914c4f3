"""From the store to a consumer's callback."""

"""The decoder-only transformer that most families are."""

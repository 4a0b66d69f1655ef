"""One address for several servers."""

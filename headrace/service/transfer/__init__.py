"""Transfer agents: processes that exchange pages with other engines, and the engine's end of the line to its own."""

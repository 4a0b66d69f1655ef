"""Text drafters and the policy that chooses how many of their drafts a step verifies. Integers and floats alone."""

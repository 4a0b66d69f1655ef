"""From request fields to engine requests and back: parameters, prompts, output streams. No API's response format."""

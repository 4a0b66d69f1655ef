"""Other dialects of chat: each translates its request to `ChatRequest` and words the answer; generating is the chat
route's."""

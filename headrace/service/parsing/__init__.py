"""Model output to events: answer text, reasoning, tool calls. Torch-free; one engine, formats as data.

Refuses: running tools, HTTP records, and enforcing a format (that is structured output).
"""

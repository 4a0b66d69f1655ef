"""Media of requests, from the bytes as they were sent to what a model's encoder takes, in processes of their own."""

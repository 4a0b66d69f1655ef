"""Images, audio and video of requests: where they come from (torch-free). Decoding is in `headrace.service.media`."""

"""``hvdlite serve-bench``: sends requests to any HTTP server, and measures how soon it answers.

- `command`: its options.
- `bodies`: what is sent.
- `schedule`: when requests are sent in an open loop.
- `client`: HTTP/1.1 connections that are kept.
- `sender`: sends requests over several of them.
- `load`: sends by the clock (open loop), or when the last answer is there (closed loop).
- `results`: counts, percentiles, and tables; `plot`: a picture of latency against load.
"""

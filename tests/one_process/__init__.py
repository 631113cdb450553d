"""A standing proof: what a program does × how it is distributed. Each pair equals one process, or is refused in words.

`python -m tests.one_process` draws pairs and runs them as jobs of real processes, and prints a table; `--everything` runs all.

- `table`: draws pairs, starts jobs, and judges what they say.
- `worker`: a rank of such a job: runs each pair, and compares with one process.
- `torch_programs`, `keras_programs`: the rows: what a program does. A new feature is a row.
- `torch_ways`, `keras_ways`: the columns: how it is distributed.
- `excuses`: the pairs that need not hold, each with the reason.
"""

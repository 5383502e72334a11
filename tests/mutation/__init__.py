"""Mutants of passes/, judged by the tests: `python -m tests.mutation`, or `make mutate`."""

"""Programs as users write them, with the type of each result, for type checkers. tests/docs/test_typed_program.py checks them.

Each public name is in them. pyright takes them too (by hand: ``pip install pyright && pyright tests/typed``).
"""

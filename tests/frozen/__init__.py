"""What the project makes, frozen: a change of any of it is a decision, not an accident.

`python -m tests.frozen.write` writes the golden files anew; test_frozen.py names what differs.
"""

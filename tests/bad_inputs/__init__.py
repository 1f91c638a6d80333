"""The catalogue of bad inputs: what a user gets wrong, the kind of error, and what it names as the fault.

Each file has `CASES`: by the kind of error, and by words of the error that name the thing at fault, the call that must
fail. Calls in `fields` and `arguments` are made on one worker; those in `set_up`, `commands` and `directories` need no
group, and take an empty folder that they are in.
"""


class Printed(Exception):
    """What a command said before it ended with another status than 0."""

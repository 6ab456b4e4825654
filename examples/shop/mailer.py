"""The shop's mail server, as the shop sees it: slow, at times too busy, and never tired of refusing a full mailbox.

It only pretends. What it does follows from the key and the attempt, so that every run of the demo sees the same.
"""

import time
from zlib import crc32

FULL_MAILBOX = "heidi"
"""A customer whom no receipt ever reaches."""


class MailError(Exception):
    """The mail server did not take the mail."""


def deliver(to: str, *, key: str, attempt: int) -> None:
    """Hand over a receipt.

    Args:
        to: the customer.
        key: idempotency key; a real mail server sends what comes twice under one key only once.
        attempt: how often the shop has tried, this time included. A sixth of the first and second attempts fail.

    Raises:
        MailError: too busy, or the mailbox is full.
    """
    dice = crc32(f"{key}/{attempt}".encode())
    time.sleep(0.05 + dice % 150 / 1000)
    if to == FULL_MAILBOX:
        raise MailError("452 mailbox full")
    if attempt <= 2 and dice % 6 == 0:
        raise MailError("421 too busy, try again later")

"""Test code that enqueues, in a transaction that is rolled back: no worker, no clean-up, and no fake.

The statements are those of a worker and the execution is that of a worker; only the connection is the test's own::

    def test_an_order_is_invoiced(session):                      # on a connection whose transaction is rolled back
        place_order(session, customer="dave")                    # the application commits: a savepoint
        assert_enqueued(session, create_invoice, order=ref(Order, 1))
        drain(session)                                           # runs what is due, as a worker would
        assert session.scalars(select(Invoice)).one().total_cents == 2500

`rolled_back` makes such a session; any other that is bound to a connection with an open transaction serves as well.
Every function takes sync sessions, scoped sessions and async ones; what it returns is awaited on the latter.

===================  ================================================================================================
`drain`              run due jobs until there are none
`inline`             run them at each commit, for as long as a ``with`` block lasts
`perform`            run one job for real; return what its handler returned
`enqueued`           the jobs that wait
`assert_enqueued`    the one that waits with such a payload
`advance`            let time go by: moves the rows, since nobody can move the database's clock
`expire_leases`      what a lost worker leaves behind
`rolled_back`        a session in a transaction that is rolled back
===================  ================================================================================================

Nothing of the library imports this package, and only its module `plugin` imports pytest.
"""

from __future__ import annotations

from sqla_jobqueue.execution import Ending, Outcome
from sqla_jobqueue.testing.asking import assert_enqueued, enqueued
from sqla_jobqueue.testing.moving import advance, expire_leases
from sqla_jobqueue.testing.running import drain, inline, perform
from sqla_jobqueue.testing.transaction import rolled_back

__all__ = [
    "Ending",
    "Outcome",
    "advance",
    "assert_enqueued",
    "drain",
    "enqueued",
    "expire_leases",
    "inline",
    "perform",
    "rolled_back",
]

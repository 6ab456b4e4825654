"""``make demo``: orders are invoiced exactly once while a worker is killed.

===============  ==================================================================================================
module           role
===============  ==================================================================================================
``__main__``     the story: server, migration, orders, the kill, the report
``processes``    the worker processes: start, freeze, kill, stop
``worker``       what such a process runs
``checks``       what must hold at the end, each a question to the database and a verdict
``screen``       progress and report, on a terminal or as plain lines
===============  ==================================================================================================
"""

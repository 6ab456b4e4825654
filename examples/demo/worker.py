"""A worker process of the demo: ``SHOP_DATABASE_URL=... python -m examples.demo.worker NAME``.

It ends with SIGTERM, or when its standard input does: so it outlives no demo, however that ends.
"""

import logging
import os
import sys
import threading
from datetime import timedelta

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from examples.shop.jobs import invoices, mail
from sqla_jobqueue import JobSession, Worker


def stop_with_demo(worker: Worker) -> None:
    sys.stdin.read()
    worker.stop()


def main(name: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    engine = create_engine(os.environ["SHOP_DATABASE_URL"], connect_args={"application_name": name})
    worker = Worker(
        invoices,
        mail,
        sessions=sessionmaker(engine, class_=JobSession),
        concurrency={"invoices": 2, "mail": 4},
        poll_interval=timedelta(milliseconds=250),
        grace=timedelta(seconds=5),
        name=name,
    )
    threading.Thread(target=stop_with_demo, args=[worker], daemon=True).start()
    print("ready", flush=True)
    code = worker.run()
    engine.dispose()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

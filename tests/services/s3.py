"""An S3 over real HTTP in a process of its own: moto's server, which holds all in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from tests.ports import unused_ports
from tests.processes import die_with_parent
from tests.services.wait import wait_for_port

BUCKET = "runs-of-a-test"
_SERVE = """
import sys
from werkzeug.serving import run_simple
from moto.server import DomainDispatcherApplication, create_backend_app
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True)
"""


class S3Server:
    """Answers from the moment it is made until `stop`. env: with it s3:// leads there."""

    def __init__(self) -> None:
        (port,) = unused_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVE, str(port)],
            preexec_fn=die_with_parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_port(port, self._process)
        self.env: Mapping[str, str] = {
            "FSSPEC_S3_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "of-a-test",
            "AWS_SECRET_ACCESS_KEY": "of-a-test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.url = f"s3://{BUCKET}"

    def make_bucket(self) -> None:
        import boto3

        keys = {"aws_access_key_id": "of-a-test", "aws_secret_access_key": "of-a-test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=self.address, **keys).create_bucket(Bucket=BUCKET)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

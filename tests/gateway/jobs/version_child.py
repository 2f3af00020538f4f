"""A gateway's part in a job, in a process over the code of a directory. Arguments: directory, the store's URL, and the
body of a job to submit, or nothing to compute one. Prints the job's id, or its request as the gateway reads it.
"""

from __future__ import annotations

import sys

sys.path.insert(0, sys.argv[1])

import falcon
import msgspec
from falcon import testing

from gateway.api.jobs import JobsResource, JobSubmitter
from gateway.api.schema import parse_autocomplete_request
from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue


class Identity:
    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        context = req.context
        context.id, context.owner, context.key, context.session, context.traceparent = "r1", "", None, None, ""
        context.charge = lambda _: None  # which earlier gateways lack


def main(directory: str, url: str, body: str = "") -> None:
    assert sys.modules["gateway"].__file__ == f"{directory}/gateway/__init__.py"
    queue = JobQueue(open_store(url), ttl_s=3600.0, max_open=100)
    if body:
        submitter = JobSubmitter(JobExecutor(queue, num_threads=1))
        app = falcon.App(middleware=[Identity()])
        app.add_route("/jobs", JobsResource(submitter, lambda _request, _caller: None))
        answer = testing.TestClient(app).simulate_post("/jobs", body=body)
        assert answer.status_code == 202, answer.text
        sys.stdout.write(answer.json["id"])
    else:
        job = queue.lease()
        assert job is not None
        request = msgspec.structs.asdict(parse_autocomplete_request(job.request))
        assert queue.finish(job, "succeeded", result=msgspec.json.encode(request))
        sys.stdout.write(msgspec.json.encode(request).decode())
    queue.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

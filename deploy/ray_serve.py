"""gemma4c under Ray Serve: a deployment whose replicas each own a `gemma4c serve`, and a GPU where there is one.

usage: GEMMA4C=gemma4c PLAN=plan.bin [GPUS=1] serve run deploy.ray_serve:app
"""

import os
import subprocess
import urllib.request

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve

api = FastAPI()
GPUS = float(os.environ.get("GPUS", "0"))


@serve.deployment(
    # Ray adds and takes away replicas by the requests that are on their way; /metrics has vLLM's names for whoever scales by those.
    autoscaling_config={"min_replicas": 2, "max_replicas": 8, "target_ongoing_requests": 32},
    max_ongoing_requests=256,
    ray_actor_options={"num_gpus": GPUS, "num_cpus": 0.5},
    health_check_period_s=2,
    graceful_shutdown_timeout_s=60,
)
@serve.ingress(api)
class Gemma:
    def __init__(self, gemma4c: str, plan: str):
        command = [gemma4c, "serve", plan, "--port", "0", "--any-model"]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # The first line comes when the weights are loaded: a replica counts as started from then on.
        self.url = self.server.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"{' '.join(command)} ended with {self.server.wait()}")
        self.client = httpx.AsyncClient(base_url=self.url, timeout=None)

    def check_health(self):
        urllib.request.urlopen(self.url + "/health", timeout=2)

    def __del__(self):
        self.server.terminate()
        self.server.wait(60)

    @api.api_route("/{path:path}", methods=["GET", "POST"])
    async def proxy(self, path: str, request: Request):
        sent = self.client.build_request(request.method, "/" + path, content=await request.body())
        answer = await self.client.send(sent, stream=True)

        async def body():
            # A client that goes away closes this, and with it the request to the server, which then ends.
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name in ("content-type", "retry-after", "x-request-id")}
        return StreamingResponse(body(), status_code=answer.status_code, headers=kept)


app = Gemma.bind(os.environ.get("GEMMA4C", "gemma4c"), os.environ["PLAN"])

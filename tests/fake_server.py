"""An OpenAI server that answers what a test tells it to, for the benchmark's client."""

import asyncio
import json

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse

DONE = "data: [DONE]\n\n"


def frame(text: str | None = None, **fields: object) -> str:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices} | fields)}\n\n"


def usage(prompt: int, completion: int) -> str:
    return frame(usage={"prompt_tokens": prompt, "completion_tokens": completion})


class FakeServer:
    """An OpenAI server that answers with the frames of `script`, a function of the request's body."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.script = lambda body: [frame("a"), frame("b"), usage(3, body["max_tokens"]), DONE]
        self.status: int | None = None
        self.refuses = ""  # a field that it doesn't know
        self.together = 1  # requests that must be open before one is answered
        self.begun = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "fake"}]})
        self.app.post("/v1/chat/completions")(self.chat)

    async def chat(self, request: Request):
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.refuses in self.bodies[-1]:
            return JSONResponse({"detail": f"Unexpected fields in the request: {{'{self.refuses}'}}"}, 422)
        if self.status is not None:
            return JSONResponse({"error": {"message": "the queue is full"}}, self.status)
        return StreamingResponse(self.frames(self.bodies[-1]), media_type="text/event-stream")

    async def frames(self, body: dict):
        self.begun += 1
        while self.begun < self.together:
            await asyncio.sleep(0.005)
        for text in self.script(body):
            if text == "hang":
                await asyncio.Event().wait()
            yield text

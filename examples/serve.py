"""A server for OpenAI's clients, see docs/serving.md: python examples/serve.py DIRECTORY"""

import asyncio
import itertools
import json
import time
from concurrent.futures import CancelledError
from typing import Any

import typer
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from graphs import AsyncSession, DecodeSession, StepOutput
from graphs.async_session import QueueFullError

CODE = {ValueError: 400, TypeError: 400, LookupError: 404, QueueFullError: 429, CancelledError: 499}
FINISH = {"eos": "stop", "max_tokens": "length"}


def asked_of(body: dict[str, Any], chat: bool, tokens_of: Any) -> tuple[list, list[dict]]:
    """Prompts, and the session's arguments for each of `n` choices; it refuses unknown names."""
    wanted = {name: value for name, value in body.items() if value is not None and name != "user"}
    most = wanted.pop("max_tokens", 2**31 if chat else None)  # more than a session has room for
    wanted.setdefault("max_new_tokens", wanted.pop("max_completion_tokens", most))
    given = wanted.pop("messages" if chat else "prompt")
    if chat:
        given = [tokens_of.chat(given)]
        if wanted.pop("logprobs", False):
            wanted["logprobs"] = wanted.pop("top_logprobs", 0)
    elif not isinstance(given, list) or all(isinstance(token, int) for token in given):
        given = [given]
    prompts = [tokens_of.ids(p) if isinstance(p, str) else p for p in given]
    form = wanted.pop("response_format", {"type": "text"})
    if form["type"] != "text":
        schema = form.get("json_schema", {}).get("schema")
        wanted["structured_outputs"] = {form["type"]: True} if schema is None else {"json": schema}
    wanted["logit_bias"] = {int(t): b for t, b in wanted.get("logit_bias", {}).items()} or None
    n, seed = wanted.pop("n", 1), wanted.pop("seed", None)
    if n not in range(1, 129):
        raise ValueError(f"n must be from 1 to 128, got {n}")
    return prompts, [wanted | {"seed": None if seed is None else seed + i} for i in range(n)]


def logprobs_of(outputs: list[StepOutput], tokenizer: Any, num_top: int | None, begin: int) -> Any:
    """As in chats with `num_top` likely tokens; None: as in completions, of text from `begin`."""
    rows: list[list[dict]] = [[] for _ in outputs]  # the drawn token, then the likeliest others
    for row, output in zip(rows, outputs, strict=True):
        for t, found in output.logprobs.items():
            text = tokenizer.decode([t])  # with U+FFFD where it is a part of a character
            name, data = (f"token_id:{t}", None) if "\ufffd" in text else (text, [*text.encode()])
            row.append({"token": name, "bytes": data, "logprob": max(found.logprob, -9999.0)})
    if num_top is not None:
        tops = [sorted(row, key=lambda one: -one["logprob"])[:num_top] for row in rows]
        return {"content": [row[0] | {"top_logprobs": tops[i]} for i, row in enumerate(rows)]}
    return {
        "tokens": [row[0]["token"] for row in rows],
        "token_logprobs": [row[0]["logprob"] for row in rows],
        "top_logprobs": [{x["token"]: x["logprob"] for x in reversed(row)} for row in rows],
        "text_offset": [*itertools.accumulate((len(o.text) for o in outputs[:-1]), initial=begin)],
    }


async def refusal(_: Request, error: Exception) -> JSONResponse:
    status = next((c for kind, c in CODE.items() if isinstance(error, kind)), 500)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": str(error), "type": kind}}, status)


def application(session: DecodeSession, opened: AsyncSession, name: str) -> FastAPI:
    """The server of a session that `opened` steps, under the model's name."""
    app = FastAPI(exception_handlers=dict.fromkeys((*CODE, RuntimeError, Exception), refusal))
    app.get("/health")(lambda: {"status": "ok"})
    told = {"id": name, "object": "model", "created": 0, "owned_by": "attn-ops"}
    app.get("/v1/models")(lambda: {"object": "list", "data": [told]})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> Response:
        chat = "chat" in request.url.path
        try:
            body = await request.json()
            model, streamed = body.pop("model", None), body.pop("stream", None)
            options = dict(body.pop("stream_options", None) or {})
            prompts, wanted = asked_of(body, chat, session.book.tokens_of)
        except Exception as error:  # templates of chats are programs
            raise ValueError(f"body must be as OpenAI's, got {error!r}") from None
        if model != name:
            raise LookupError(f"model must be {name}, got {model}")
        streams = [opened.stream(p, **each) for p in prompts for each in wanted]
        gone = asyncio.ensure_future(request.receive())  # behind the body comes the end
        gone.add_done_callback(lambda _: [opened.abort(stream) for stream in streams])
        kind = f"chat.completion{'.chunk' * bool(streamed)}" if chat else "text_completion"
        now, num_top = time.time_ns(), wanted[0].get("logprobs") if chat else None
        head = {"id": f"{now}", "object": kind, "created": now // 10**9, "model": name}

        def choice(number: int, outputs: list[StepOutput], begin: int = -1) -> dict[str, Any]:
            reason, text = outputs[-1].finish_reason, "".join(o.text for o in outputs)
            message = {"content": text} | ({"role": "assistant"} if begin < 0 else {})
            found = {"delta" if streamed else "message": message} if chat else {"text": text}
            if "logprobs" in wanted[0]:
                found["logprobs"] = logprobs_of(outputs, session.tokenizer, num_top, max(begin, 0))
            return found | {"index": number, "finish_reason": FINISH.get(reason, reason)}

        def usage(num: int) -> dict[str, int]:
            given = sum(map(len, prompts))
            return {"prompt_tokens": given, "completion_tokens": num, "total_tokens": given + num}

        async def events():
            num = 0
            try:
                for number, stream in enumerate(streams):
                    begin = -1
                    async for output in stream:
                        if num == 0:
                            yield ""  # nothing is refused any more
                        part = head | {"choices": [choice(number, [output], begin)]}
                        yield f"data: {json.dumps(part)}\n\n"
                        begin, num = max(begin, 0) + len(output.text), num + 1
                if options.get("include_usage"):
                    yield f"data: {json.dumps(head | {'choices': [], 'usage': usage(num)})}\n\n"
                yield "data: [DONE]\n\n"
            except Exception as error:
                if num == 0:
                    raise
                yield f"data: {(await refusal(request, error)).body.decode()}\n\n"

        if streamed:
            await anext(sent := events())
            return StreamingResponse(sent, media_type="text/event-stream")
        found = [[output async for output in stream] for stream in streams]
        head |= {"choices": list(map(choice, range(len(found)), found))}
        return JSONResponse(head | {"usage": usage(sum(map(len, found)))})

    return app


def main(directory: str, host: str = "127.0.0.1", port: int = 8000, max_batch_size: int = 32,
         max_tokens: int = 0, max_waiting: int = 256, model_name: str = "") -> None:  # fmt: skip
    sizes = {"max_tokens": max_tokens} if max_tokens else {}  # 0: 4,096 at most
    session = DecodeSession.from_pretrained(directory, max_batch_size=max_batch_size, **sizes)
    session.warm_up()
    with AsyncSession(session, max_waiting=max_waiting) as opened:
        uvicorn.run(application(session, opened, model_name or directory), host=host, port=port)


if __name__ == "__main__":
    typer.run(main)

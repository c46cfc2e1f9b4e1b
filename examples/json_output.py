"""An answer that follows a JSON schema: python examples/json_output.py DIRECTORY"""

import json
import sys

from graphs import DecodeSession

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
}


def answer(path: str, question: str) -> dict:
    session = DecodeSession.from_pretrained(path, max_batch_size=1)
    messages = [{"role": "user", "content": question}]
    return json.loads(session.chat(messages, 64, structured_outputs={"json": SCHEMA}).text)


if __name__ == "__main__":
    print(answer(sys.argv[1], "Which city is the capital of France? Answer in JSON."))

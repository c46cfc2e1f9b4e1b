"""A conversation with a model: python examples/chat.py DIRECTORY"""

import sys

from graphs import DecodeSession


def answers(path: str, questions: list[str]) -> list[str]:
    session = DecodeSession.from_pretrained(path, max_batch_size=1, share_prefixes=True)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = session.chat(messages, max_new_tokens=64).text
        messages.append({"role": "assistant", "content": answer})
    return [message["content"] for message in messages[1::2]]


if __name__ == "__main__":
    print(*answers(sys.argv[1], ["What is the capital of France?", "And of Italy?"]), sep="\n")

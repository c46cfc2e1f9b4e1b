"""Two streams at once in asyncio: python examples/asyncio_stream.py DIRECTORY"""

import asyncio
import sys

from graphs import AsyncSession, DecodeSession


async def told(opened: AsyncSession, prompt: str) -> str:
    return "".join([output.text async for output in opened.stream(prompt, 32)])


async def main(path: str, prompts: list[str]) -> list[str]:
    session = DecodeSession.from_pretrained(path, max_batch_size=8)
    async with AsyncSession(session) as opened:
        return await asyncio.gather(*(told(opened, prompt) for prompt in prompts))


if __name__ == "__main__":
    print(*asyncio.run(main(sys.argv[1], ["Once upon a time", "The sea is"])), sep="\n")

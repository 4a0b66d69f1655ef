"""How large images delay the streams of others: ``python -m benchmarks.images_beside_text [--device cpu]``.

Starts a server with a model of Qwen2.5-VL's kind and random weights. Clients stream text all the time; then JPEG files
of 8 MB, no two alike, are posted beside them, and the gaps between tokens of the same streams are compared. ``--shape
7b`` is Qwen2.5-VL-7B, ``3b`` a model with fewer layers, whose steps are so short that the HTTP process and the clients
bound them; ``tiny`` is for a CPU. With ``--targets 0 2 3`` it is done once for each ``--inter-token-target-ms``, 0 for
none. Images are posted by a process of its own; where there are many CPUs, the clients have some to themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import io
import json
import os
import random
import string
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.cpu_servers import headrace, run_server
from benchmarks.vision import MODELS
from headrace.serving.http_client import loop_factory

MARKS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)
FIRST_MARK = 256
"""Ids below are text."""
TEMPLATE = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}\
{% endif %}{% endfor %}"""
SHAPES = {
    "tiny": (
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
         "fullatt_block_indexes": [1]},
    ),
    "3b": (
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 12, "num_attention_heads": 16,
         "num_key_value_heads": 2},
        {"out_hidden_size": 2048, "depth": 16, "fullatt_block_indexes": [7, 15]},
    ),
    "7b": ({"num_hidden_layers": 28}, {}),
}
JPEGS = 4
"""Files that are made; each post has other bytes behind the end of one, so that none is in a cache."""


def write_model(folder: Path, shape: str) -> None:
    """Configuration, tokenizer, chat template and image processor."""
    (text, vision), whole = SHAPES[shape], MODELS["qwen2.5-vl-7b"]
    # Every id is text, marks too, and ASCII. With bytes of their own, random tokens would begin characters of several
    # bytes, whose text a server keeps back: gaps between pieces of text would be of several steps.
    characters = [chr(byte) for byte in range(33, 127)] + [chr(256 + i) for i in range(34)]  # as ByteLevel writes them
    pairs = [first + second for first in string.ascii_lowercase for second in string.ascii_lowercase]
    words = {word: i for i, word in enumerate([*characters, *pairs][:FIRST_MARK])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {mark: FIRST_MARK + i for i, mark in enumerate(MARKS)}
    (folder / "config.json").write_text(json.dumps({
        **whole.config, **text, "vocab_size": 264, "vision_config": {**whole.vision, **vision},
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
    }))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    }))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14,
        "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    }))


def make_jpegs(mega_bytes: float) -> list[bytes]:
    """Noise, as large as asked."""
    from PIL import Image

    def make(seed: int, side: int) -> bytes:
        buffer = io.BytesIO()
        values = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(values).save(buffer, "JPEG", quality=90)
        return buffer.getvalue()

    side = int(256 * (mega_bytes * 1e6 / len(make(0, 256))) ** 0.5)
    return [make(seed, side) for seed in range(JPEGS)]


class Streams:
    """Clients that stream text without end; ``gaps`` are the seconds between pieces of one stream, with their time."""

    def __init__(self, port: int, num_tokens: int):
        self._port, self._num_tokens = port, num_tokens
        self.gaps: list[tuple[float, float]] = []

    async def run(self, number: int) -> None:
        """One client; ends when it is cancelled."""
        rng = random.Random(number)  # streams of one length would all begin again at once
        for turn in range(1_000_000):
            count = rng.randint(self._num_tokens // 2, 3 * self._num_tokens // 2)
            body = {
                "model": "default", "messages": [{"role": "user", "content": f"{number} {turn} and so on"}],
                "max_tokens": count, "ignore_eos": True, "stream": True, "temperature": 1.0,
                "skip_special_tokens": False,
            }
            reader, writer = await post(self._port, json.dumps(body).encode())
            try:
                last = 0.0
                while line := await reader.readline():
                    if line.startswith(b"data: [DONE]"):
                        break
                    if line.startswith(b"data: "):
                        now = time.perf_counter()
                        if last:
                            self.gaps.append((now, now - last))
                        last = now
            finally:
                writer.close()

    def count_longer(self, bound_ms: float, begin: float, end: float) -> tuple[float, int]:
        """The share and the number of a time's gaps that are longer."""
        gaps = np.array([gap for at, gap in self.gaps if begin <= at < end]) * 1e3
        return float(np.mean(gaps > bound_ms)), int(np.sum(gaps > bound_ms))

    def describe(self, begin: float, end: float) -> tuple[float, float, float]:
        """Median, p99 and longest gap of a time, in milliseconds."""
        gaps = np.array([gap for at, gap in self.gaps if begin <= at < end]) * 1e3
        return float(np.median(gaps)), float(np.percentile(gaps, 99)), float(gaps.max())


async def post(port: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The answer of a chat completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


def make_bodies(jpegs: list[bytes], count: int) -> list[bytes]:
    """Requests of one image each, no two alike."""
    found = []
    for number in range(count):
        data = jpegs[number % len(jpegs)] + number.to_bytes(8, "little")
        url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        body = {"model": "default", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        found.append(json.dumps(body).encode())
    return found


def send(port: int, body: bytes) -> float:
    """Seconds until a request is answered."""
    begin, line = time.perf_counter(), http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    line.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = line.getresponse()
    text = answer.read()
    assert answer.status == 200, text[:600]
    return time.perf_counter() - begin


async def send_images(port: int, bodies: list[bytes], every_s: float) -> list[float]:
    """Posts an image every so often; seconds that each answer took."""
    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(asyncio.to_thread(send, port, body)))
        await asyncio.sleep(every_s)
    return list(await asyncio.gather(*tasks))


class Poster:
    """What the process that posts images keeps: ``bodies`` of requests, made ahead."""

    bodies: ClassVar[list[bytes]] = []

    @classmethod
    def make(cls, megabytes: float, count: int) -> None:
        """Make bodies of so many images."""
        cls.bodies = make_bodies(make_jpegs(megabytes), count)

    @classmethod
    def post(cls, port: int, count: int, every_s: float) -> list[float]:
        """Post the next images; seconds that each answer took."""
        bodies, cls.bodies = cls.bodies[:count], cls.bodies[count:]
        return asyncio.run(send_images(port, bodies, every_s))


async def measure(port: int, options: argparse.Namespace, posting: ProcessPoolExecutor) -> None:
    """Prints gaps without and with images."""
    streams, loop = Streams(port, options.tokens), asyncio.get_running_loop()
    count = int(options.seconds / options.every)
    await loop.run_in_executor(posting, Poster.make, options.megabytes, 2 + count)
    await loop.run_in_executor(posting, Poster.post, port, 1, 0)  # loads the processor, compiles kernels
    clients = [asyncio.create_task(streams.run(i)) for i in range(options.streams)]
    await asyncio.sleep(options.warm_up)
    await loop.run_in_executor(posting, Poster.post, port, 1, 0)  # the first one beside streams
    times = [time.perf_counter()]
    await asyncio.sleep(options.seconds)
    times.append(time.perf_counter())
    took = sorted(await loop.run_in_executor(posting, Poster.post, port, count, options.every))
    times.append(time.perf_counter())
    for client in clients:
        client.cancel()
    alone, beside = streams.describe(*times[:2]), streams.describe(*times[1:])
    for name, (median, p99, longest) in (("text alone", alone), ("beside images", beside)):
        print(f"{name:14} gaps: median {median:6.2f} ms, p99 {p99:6.2f} ms, longest {longest:6.1f} ms")
    print(
        f"{len(took)} images of {options.megabytes:.1f} MB, one every {options.every:g} s, answered in "
        f"{took[len(took) // 2] * 1e3:.0f} ms (median); p99 of text {100 * (beside[1] / alone[1] - 1):+.0f} %"
    )
    # p99 has grown by more than 20 % if more than a hundredth are longer than this
    bound = 1.2 * alone[1]
    shares = [streams.count_longer(bound, *pair) for pair in (times[:2], times[1:])]
    print(
        f"gaps above {bound:.2f} ms: {shares[0][0]:.2%} alone, {shares[1][0]:.2%} beside, "
        f"{shares[1][1] / options.streams / len(took):.1f} a stream and image"
    )


def share_cpus(num_clients: int) -> tuple[set[int], set[int]]:
    """CPUs of the server, and of the clients, which have ``num_clients`` to themselves if as many are left twice."""
    own = sorted(os.sched_getaffinity(0))
    if not num_clients or len(own) < 3 * num_clients:
        return set(own), set(own)
    return set(own[:-num_clients]), set(own[-num_clients:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="7b", choices=list(SHAPES))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream, or half as many more or less")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between images")
    parser.add_argument("--warm-up", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=4.0, help="without images, and with them")
    parser.add_argument("--client-cpus", type=int, default=4, help="that the server does not use, if there are many")
    parser.add_argument(
        "--targets", type=float, nargs="+", default=[0.0], metavar="MS", help="inter-token targets; 0 for none"
    )
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.shape)
        given = ["--load-format", "dummy", "--device", options.device, "--max-model-len", "4096", *flags]
        server_cpus, client_cpus = share_cpus(options.client_cpus)
        for target in options.targets:
            os.sched_setaffinity(0, server_cpus)  # which the server's processes inherit
            bound = ["--inter-token-target-ms", str(target)] if target else []
            with run_server(headrace(folder, given + bound), patience_s=120) as server:
                name = f"target {target:g} ms" if target else "no target"
                print(f"{name}: ready after {server.start_s:.1f} s", flush=True)
                os.sched_setaffinity(0, client_cpus)
                port = int(server.base_url.rsplit(":", 1)[1])
                with (
                    ProcessPoolExecutor(1, get_context("spawn")) as posting,
                    asyncio.Runner(loop_factory=loop_factory()) as runner,
                ):
                    runner.run(measure(port, options, posting))


if __name__ == "__main__":
    main()

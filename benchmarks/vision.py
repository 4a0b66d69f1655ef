"""Images through the engine on a GPU, on a model of Qwen2.5-VL-7B's or Qwen3-VL-8B's shape with random weights:
requests of one 1024 x 1024 image and 128 tokens out; the encoder's speed alone; first token of a repeated image.

python -m benchmarks.vision [--model qwen3-vl-8b] [--requests 64] [--layers 28] [--encoder-only] [--graphs lazy]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.base.config import engine_config
from headrace.base.media import LEVELS, NUM_LEVELS, MediaArray, MediaItem, MediaPlace, digest_of
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.layers.media import finish
from headrace.service.build import build_engine
from headrace.service.engine import Engine

MERGE = 2
IMAGE_ID = 151655
REPEATS = 8
"""Images of which the first token is timed, fresh and again."""


@dataclass(frozen=True)
class Shape:
    """A model with its ``config``, and the patches of an image: ``side`` rows of as many."""

    config: dict[str, Any]
    side: int

    @property
    def vision(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["vision_config"]
        return found

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return 3 * 2 * int(self.vision["patch_size"]) ** 2

    @property
    def num_tokens(self) -> int:
        """Placeholders of an image."""
        return self.side**2 // MERGE**2

    def count_flops(self) -> float:
        """FLOPs of the encoder for one image: products, and attention in windows and in whole."""
        vision, patches = self.vision, self.side**2
        size, depth, merged = vision["hidden_size"], vision["depth"], MERGE**2 * vision["hidden_size"]
        full = len(vision.get("fullatt_block_indexes", range(depth)))
        inner = vision["intermediate_size"] * (3 if "window_size" in vision else 2)
        products = 2 * patches * (4 * size**2 + size * inner) * depth
        attention = 4 * patches * size * (patches * full + 64 * (depth - full))
        mergers = 1 + len(vision.get("deepstack_visual_indexes", ()))
        merging = 2 * self.num_tokens * (merged**2 + merged * vision["out_hidden_size"]) * mergers
        return float(products + attention + merging + 2 * patches * self.patch_size * size)


MODELS = {
    "qwen2.5-vl-7b": Shape({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vocab_size": 152064,
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "torch_dtype": "bfloat16",
        "image_token_id": IMAGE_ID, "video_token_id": 151656,
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }, 74),
    "qwen3-vl-8b": Shape({
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "torch_dtype": "bfloat16",
        "image_token_id": IMAGE_ID, "video_token_id": 151656, "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6, "rope_theta": 5e6, "torch_dtype": "bfloat16",
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 4096,
            "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24],
        },
    }, 64),
}


def make_image(shape: Shape, seed: int) -> MediaItem:
    """An image, of bytes as workers prepare it; its placeholders begin at 10."""
    grid = (1, shape.side, shape.side)
    values = np.random.default_rng(seed).integers(0, NUM_LEVELS, (shape.side**2, shape.patch_size), dtype=np.uint8)
    levels = np.tile(np.linspace(-1.8, 2.1, NUM_LEVELS, dtype=np.float32), (3, 1))
    place = MediaPlace("image", digest_of("image", "", [values.tobytes()]), [(10, shape.num_tokens)], grid)
    return MediaItem(place, {"pixel_values": MediaArray.of(values), LEVELS: MediaArray.of(levels)})


def make_request(name: str, item: MediaItem, num_tokens: int) -> EngineRequest:
    """Ten tokens, the image, ten tokens."""
    ids = [*range(100, 110), *[IMAGE_ID] * item.place.num_tokens, *range(110, 120)]
    return EngineRequest(name, ids, SamplingSpec(), StopSpec(num_tokens), media=[item])


def run(engine: Engine, requests: list[EngineRequest]) -> tuple[float, list[float]]:
    """Seconds in all, and to each request's first token."""
    begin, firsts = time.perf_counter(), {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            assert output.finish is None or output.finish.error is None, output.finish
            if output.token_ids:
                firsts.setdefault(output.request_id, time.perf_counter() - begin)
    return time.perf_counter() - begin, sorted(firsts.values())


def time_encoder(engine: Engine, count: int, num_tokens: int) -> float:
    """Seconds of one call of the encoder for so many items of ``num_tokens`` each, already on the device."""
    model = engine.executor._model._loaded.model
    items = [item for _ in range(count) for item in model.media.example(num_tokens)]
    with torch.inference_mode():
        for _ in range(2):
            finish(model.media.encode(items))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            finish(model.media.encode(items))
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-vl-7b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--layers", type=int, default=28, help="of the decoder")
    parser.add_argument("--encoder-only", action="store_true")
    parser.add_argument("--graphs", choices=["on", "lazy"], default="on", help="lazy: recorded while requests wait")
    options = parser.parse_args()
    shape, folder = MODELS[options.model], Path(tempfile.mkdtemp())
    config = json.loads(json.dumps(shape.config))
    config.get("text_config", config)["num_hidden_layers"] = options.layers
    (folder / "config.json").write_text(json.dumps(config))
    engine = build_engine(engine_config(
        model=str(folder), load_format="dummy", skip_tokenizer=True, device="cuda", max_model_len=4096,
        max_running_requests=max(64, options.requests), graphs=options.graphs, encoder_cache_mib=1024,
    ))
    for count in (1, 4, 16):
        seconds = time_encoder(engine, count, shape.num_tokens)
        speed = count * shape.count_flops() / seconds / 1e12
        print(f"encoder, {count:2} images: {seconds * 1e3:7.2f} ms, {speed:5.0f} TFLOP/s")
    if not options.encoder_only:
        run_requests(engine, shape, options.requests)
        print(f"kernels that a step waited for: {engine.executor.late_kernels}")
    engine.close()


def run_requests(engine: Engine, shape: Shape, num_requests: int) -> None:
    """Requests at once, and first tokens of images alone."""
    run(engine, [make_request("warm", make_image(shape, 10_000), 8)])
    images = [make_image(shape, seed) for seed in range(num_requests)]
    seconds, firsts = run(engine, [make_request(f"r{i}", image, 128) for i, image in enumerate(images)])
    print(
        f"{num_requests} requests: {seconds:.2f} s, {num_requests / seconds:.1f} images/s, first token "
        f"median {firsts[len(firsts) // 2]:.2f} s, last {firsts[-1]:.2f} s"
    )
    first: list[float] = []
    again: list[float] = []
    for seed in range(20_000, 20_000 + REPEATS):
        for kind, found in (("fresh", first), ("again", again)):
            found.append(run(engine, [make_request(f"{kind} {seed}", make_image(shape, seed), 4)])[1][0])
    # the first pair records graphs and compiles kernels for steps of few tokens
    fresh_s, again_s = sorted(first[1:])[len(first) // 2 - 1], sorted(again[1:])[len(again) // 2 - 1]
    print(f"one image: first token {fresh_s * 1e3:.1f} ms, again {again_s * 1e3:.1f} ms: {fresh_s / again_s:.1f} times")


if __name__ == "__main__":
    main()

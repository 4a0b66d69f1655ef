"""Speech through the engine on a GPU, on a model of Whisper-large-v3's shape with random weights: requests of one
window of 30 seconds and 200 tokens each, all at once; the encoder's speed alone; first token of a repeated window.

python -m benchmarks.speech [--requests 16] [--layers 32]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.vision import run, time_encoder
from headrace.base.config import engine_config
from headrace.base.media import MediaArray, MediaItem, MediaPlace, digest_of
from headrace.base.media_facts import WindowFrames
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.build import build_engine
from headrace.service.engine import Engine

SIZE, INNER, POSITIONS, MELS, VOCAB = 1280, 5120, 1500, 128, 51866
PROMPT = (50258, 50259, 50360, 50364)
"""Start of transcript, English, transcribe, no time stamps."""
CONFIG = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "vocab_size": VOCAB,
    "num_mel_bins": MELS, "d_model": SIZE, "encoder_attention_heads": 20, "decoder_attention_heads": 20,
    "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "max_source_positions": POSITIONS, "max_target_positions": 448,
    "decoder_start_token_id": PROMPT[0], "eos_token_id": 50257, "torch_dtype": "bfloat16",
}


def make_request(name: str, seed: int, engine: Engine, num_tokens: int) -> EngineRequest:
    """A window of noise, and the usual prompt."""
    facts = engine.executor.facts.media
    assert facts is not None and isinstance(facts.frames, WindowFrames)
    count, token_id = facts.frames.num_tokens, facts.token_ids["audio"]
    values = np.random.default_rng(seed).standard_normal((2 * POSITIONS, MELS), dtype=np.float32)
    place = MediaPlace("audio", digest_of("audio", "", [values.tobytes()]), [(0, count)])
    item = MediaItem(place, {"input_features": MediaArray.of(values)})
    return EngineRequest(name, [*[token_id] * count, *PROMPT], SamplingSpec(), StopSpec(num_tokens), media=[item])


def count_flops(layers: int) -> float:
    """FLOPs of the encoder for one window: convolutions, products and attention."""
    block = 2 * POSITIONS * (4 * SIZE**2 + 2 * SIZE * INNER) + 4 * POSITIONS**2 * SIZE
    return block * layers + 2 * POSITIONS * 3 * (2 * MELS * SIZE + SIZE**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-tokens", type=int, default=12_800, help="of prompts and windows; 1,540 are a request")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    layers = {"encoder_layers": options.layers, "decoder_layers": options.layers}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **layers}))
    engine = build_engine(engine_config(
        model=str(folder), load_format="dummy", skip_tokenizer=True, device="cuda",
        max_running_requests=max(16, options.requests), memory_fraction=0.5,
        max_step_tokens=options.step_tokens, max_encoder_tokens=options.step_tokens,
    ))
    for count in (1, 4, 8):
        seconds = time_encoder(engine, count, 1)
        speed = count * count_flops(options.layers) / seconds / 1e12
        print(f"encoder, {count:2} windows: {seconds * 1e3:7.2f} ms, {speed:5.0f} TFLOP/s")
    run(engine, [make_request(f"warm{i}", 10_000 + i, engine, 8) for i in range(options.requests)])
    for attempt in range(3):
        asks = [
            make_request(f"r{attempt}.{i}", attempt * 1000 + i, engine, options.tokens) for i in range(options.requests)
        ]
        seconds, firsts = run(engine, asks)
        print(
            f"{options.requests} windows, {options.tokens} tokens each: {seconds:.3f} s, first token median "
            f"{firsts[len(firsts) // 2]:.3f} s, last {firsts[-1]:.3f} s, "
            f"{30 * options.requests / seconds:.0f} times as fast as sound"
        )
    _, fresh = run(engine, [make_request("fresh", 20_000, engine, 4)])
    _, again = run(engine, [make_request("again", 20_000, engine, 4)])
    print(f"one window: first token {fresh[0] * 1e3:.1f} ms, again {again[0] * 1e3:.1f} ms")
    engine.close()


if __name__ == "__main__":
    main()
